"""The causes of failures. Each cause has signs in a run's records, a check, and changes that help.

limits.json counts how often each cause shows each sign, in runs that we broke on purpose (tools/calibration/alarms.py).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import EVENT, FOLLOWS, Alarm
from lamina.training.monitor.loss_chart import noise_of
from lamina.training.monitor.rules import calibration

NOT_KNOWN = "not known"
VIEWS = ("loss", "norm", "layers")
"""The kinds of other tools' records: with only the loss, with the gradient norm, or with gradient norms by layer."""
HISTORIES = Path(__file__).parent / "assets" / "history_signs.json"
"""The counts of signs for each cause, in records of other tools. tools/calibration/history_odds.py writes this file."""
TELLING = ("not_finite", "skipped", "guess", "kept", "dead", "unmoved", "forgotten", "written", "repeated")
"""Monitor rules for which a single alarm is strong evidence, no matter when the alarm comes."""
STEPS = 60  # an alarm belongs to the event of the first one if it comes within so many steps
_THEN = "then "
AFTER = "after"  # not a sign: whether the record ends too early for later signs
START = 3  # alarms within so many steps are at once; an alarm within the first so many is at the start
GROWN = 1.3  # a learning rate has grown if it is so many times the rate of one of the two records before
JUMPED = 3.0  # a rate has jumped if it is so many times the record before's: no schedule does that in mid-run
NOISES, NATS = 4.0, 0.1  # a loss has moved if it differs by so many noises and so many nats
TEMPER = 2.0  # divides the log-likelihood of correlated signs
ALONE = ("first", "telling", "where", "rate", "half", "jump")  # signs that are independent, so not divided
LEAST = 0.7  # a cause in another tool's record is reported from this probability
SECOND = 0.2  # a second cause is reported from this probability
REMAINING = 0.05  # where no cause is likely enough, a cause remains possible from this probability
_AROUND = (16, 5)  # how many losses are compared: before the first alarm, and from it on


@dataclass(frozen=True, kw_only=True)
class Change:
    text: str
    setting: str = ""  # the run has the change already if this setting has the value ``made``,
    made: str | float | None = None  # a positive value up to the number ``made``, or any value (None)

    def is_made(self, settings: Json) -> bool:
        value = settings.get(self.setting)
        if isinstance(self.made, float):
            return isinstance(value, int | float) and 0 < value <= self.made
        return value == self.made if self.made is not None else bool(self.setting) and value is not None


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A kind of failure. The texts contain ``{step}``, ``{where}`` and ``{batch}`` for the first anomaly."""

    name: str  # the cause's name in the counts of signs
    finding: str  # the title of a page, with the cause and its step
    meaning: str  # a sentence on the mechanism
    check: str  # a short test that shows whether this cause is right
    changes: tuple[str | Change, ...]  # the changes that help, most useful change first
    claims: tuple[str, ...] = ()  # Lamina's studies that tested one of these changes
    unlike: tuple[str, ...] = ()  # signs that exclude this cause
    proofs: tuple[str, ...] = ()  # signs that prove this cause, because they measure the cause itself
    in_half: str = ""  # another cause that has the same signs in float16 training
    needs: str = ""  # the metric that a run must record before Lamina names this cause
    needs_setting: str = ""  # a setting that excludes this cause if the setting is 0
    shown: tuple[str, ...] = ()  # signs, one of which Lamina's own records must contain before Lamina names this cause


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            name="number range",
            finding="values outside the number format's range, from step {step} on",
            proofs=("telling: skipped",),
            meaning="Values exceeded the range of the number format before the loss changed.",
            check=(
                "run 20 steps from a checkpoint before step {step} in bfloat16 or float32: Lamina should raise no alarm"
            ),
            changes=(
                Change(
                    text="train in bfloat16 instead of float16, because bfloat16 has float32's range",
                    setting="precision",
                    made="bf16",
                ),
                "put a norm on each sub-layer's output, as Peri-LN does. Peri-LN's activations stay within float16's "
                "range, and Pre-LN's activations exceed it (arXiv 2502.02732, Fig 11)",
                "lower the learning rate, because a larger learning rate gives larger magnitudes",
            ),
            claims=("peri-fp16", "peri-growth"),
            unlike=("half: False",),
        ),
        Cause(
            name="values that are not finite",
            finding="values that are not finite from step {step}",
            in_half="number range",
            meaning="These values did not grow slowly: a batch, a weight or an operation such as 0/0 or log 0 produced "
            "them.",
            check="repeat step {step} with the same batch and weights under torch.autograd.set_detect_anomaly(True), "
            "which names the operation",
            changes=(
                "inspect {batch} for values that are not finite, and for examples without a "
                "label (their mean loss is 0/0)",
                Change(text="skip such steps with lamina.watch(..., skip_outliers=6)", setting="skip_outliers"),
            ),
        ),
        Cause(
            name="weights changed",
            finding="weights overwritten at step {step}",
            proofs=("first: written size",),
            meaning="Something other than the optimizer changed the weights between two steps.",
            check="compare the weights of {where} with the last checkpoint before step {step}, tensor by tensor",
            changes=(
                "find the code that changed {where}: it may load part of a checkpoint, initialize weights again, or "
                "set a layer or gain by hand",
                "if no code changed {where}, look for one huge update (lamina.watch(..., every=1) records every step) "
                "or for faulty memory",
            ),
        ),
        Cause(
            name="learning rate too high",
            finding="learning rate too high from step {step}",
            unlike=("telling: written",),
            proofs=("rate: jumped", "then rise learning_rate: yes"),
            meaning="Each update moves the weights too far, so the loss no longer falls.",
            check="continue from a checkpoint before step {step} for 50 steps at a third of the learning rate: "
            "Lamina should raise no alarm",
            changes=(
                "lower the peak learning rate by a factor of 2 to 3, or find the limit with lamina max-lr",
                "lengthen the warm-up (Peri-LN, App G.1)",
                Change(
                    text="set beta2 to 0.95 instead of 0.999. The second moment then adapts sooner, so a burst of "
                    "gradients after a calm phase makes smaller updates",
                    setting="beta2",
                    made=0.95,
                ),
                "compare placements that tolerate higher learning rates (Peri-LN, Keel) on your text: lamina compare",
            ),
            claims=("peri-lr", "keel-maxlr", "peri-budget"),
        ),
        Cause(
            name="attention logits",
            shown=("then logit attention_logit: yes", "then rise attention_logit: yes", "then rise size: yes"),
            finding="attention saturated from step {step}",
            meaning="Attention attends to single tokens, so its softmax saturates and its gradient vanishes.",
            check=(
                "print the largest logit of each head in {where} for one batch, to see whether one head or all "
                "heads saturate"
            ),
            changes=(
                "put norms on queries and keys (QK-norm; Dehghani et al. 2023, arXiv 2302.05442)",
                "lower the learning rate, or raise weight decay on the query and key projections",
            ),
            claims=("peri-qk",),
        ),
        Cause(
            name="bad batch",
            finding="bad batch at step {step}",
            unlike=("telling: written", "then fall size: yes", "jump: stays"),
            meaning="One or a few batches gave gradients of an unusual size.",
            check="compute the loss of {batch} with the last checkpoint, example by example",
            changes=(
                "inspect {batch}: repeated text, wrong labels, another language or format",
                Change(
                    text="skip outliers with lamina.watch(..., skip_outliers=6) (OLMo-core's SkipStepOptimizer)",
                    setting="skip_outliers",
                ),
                Change(text="clip the gradient's norm (max_grad_norm=1.0)", setting="max_grad_norm", made=1.0),
                "go back to a checkpoint before step {step} and skip the data, as PaLM did (arXiv 2204.02311, Sec 5.1)",
            ),
            claims=("peri-instability",),
        ),
        Cause(
            name="labels or data",
            finding="labels or data changed at step {step}",
            unlike=("telling: written", "then fall size: yes"),
            proofs=("then repeated batch_repeats: yes", "then fall label_match: yes"),
            meaning="The model gets different texts, different labels, or the same batch again.",
            check="print the inputs and labels of step {step} as text. Then compute the loss of an earlier batch with "
            "the current weights. The earlier batch should still have a low loss",
            changes=(
                "check how your code makes inputs and labels from step {step} on. Look for a shift, a wrong mask, "
                "another file or a repeated batch",
                "check whether the data loader repeats batches, or mixes in another source",
            ),
        ),
        Cause(
            name="dead layer",
            shown=("then dead gradient: yes",),
            finding="a layer without a gradient, from step {step} on",
            meaning="The sub-layer is disconnected from the loss, or all its units are inactive.",
            check="run one forward pass with a hook on {where}, to see whether its input or its output is zero",
            changes=(
                "check whether the output of {where} reaches the residual stream. If two factors in a row (gain, "
                "gate or projection) are zero, both stay zero",
                "initialize the weights of {where} again, like the weights of the other layers",
            ),
        ),
        Cause(
            name="not trained",
            shown=("then unmoved update_norm: yes",),
            finding="weights that do not change from step {step} on",
            meaning="These weights get a gradient but do not change. Most likely, no optimizer has these weights.",
            check="check whether the ids of all model.parameters() are in optimizer.param_groups, and print "
            "requires_grad",
            changes=(
                "give the optimizer the parameters of {where}. If you replace, wrap or unfreeze a layer after you "
                "create the optimizer, the optimizer does not see this layer",
                "if you froze {where} on purpose, change nothing",
            ),
        ),
        Cause(
            name="gradients kept",
            finding="gradients not set to zero, from step {step} on",
            proofs=("telling: kept",),
            meaning="A step's gradient still contains the gradients of earlier steps.",
            check="print a parameter's .grad right before the backward pass: it should be None or zero",
            changes=(
                "for every optimizer, call zero_grad() once per step()",
                "if you accumulate micro-batches, zero the gradients after each step, not only at the start",
            ),
        ),
        Cause(
            name="optimizer groups",
            finding="an optimizer group with a different learning rate, from step {step} on",
            proofs=("then apart rate_ratio: yes",),
            meaning="One part of the model changes much more, relative to its size, than similar parts.",
            check="print lr, weight_decay and the parameters' names of each group in optimizer.param_groups",
            changes=(
                "give this group the other groups' learning rate. If you want different learning rates, note this in "
                "your settings",
            ),
        ),
        Cause(
            name="optimizer state",
            finding="optimizer state lost at step {step}",
            proofs=("then forgotten forgotten_share: yes",),
            meaning="The optimizer's moments were lost or changed between two steps.",
            check="print the optimizer's step count and the norm of exp_avg_sq right before and after step {step}",
            changes=(
                "when you resume a run, load the optimizer's state together with the weights",
                "if you cannot load the state, warm up the learning rate again",
            ),
        ),
        Cause(
            name="weight decay",
            needs_setting="weight_decay",
            shown=("then fall size: yes",),
            finding="weight decay too strong, visible from step {step}",
            meaning="Weights or gains shrink at each step, because weight decay outweighs the gradient.",
            check="continue from a checkpoint for 50 steps with weight_decay 0 for {where}: the norm of {where} should "
            "stop falling",
            changes=(
                "exclude norms' gains and biases from weight decay, and usually the embedding too",
                "keep the product of weight_decay and learning rate below 1e-3, because a larger product shrinks "
                "weights within a run",
            ),
        ),
        Cause(
            name="embedding rows",
            shown=("then rise row_norm_abs_max: yes",),
            finding="an embedding row growing from step {step}",
            meaning="Only one token's vector grows.",
            check="print the longest rows of the embedding with their tokens, at two checkpoints",
            changes=(
                "look for the row's token in the batches: the token may be unmasked padding or a repeated token",
                "lower the embedding's learning rate, or normalize it (Takase et al. 2023, arXiv 2312.16903)",
            ),
        ),
        Cause(
            name="experts",
            needs="expert_load",
            finding="experts out of balance from step {step}",
            meaning="The router sends more and more tokens to few experts, and the others no longer train.",
            check="plot the expert loads of {where} over the last records: run lamina report",
            changes=(
                "raise the weight of the balancing loss, and check that the training loss contains this term",
                "lower the router's learning rate",
            ),
        ),
        Cause(
            name="initialization",
            finding="faulty initialization, visible at step {step}",
            meaning="From the first steps on, one part differed from similar parts by an order of magnitude.",
            check="print the standard deviation of each layer's weights at step 0, and compare {where} with the rest",
            changes=(
                "give this part the initializer of the other layers (lamina.build(..., init=...) "
                "initializes all layers)",
                "scale the output projections by 1/sqrt(2 num_layers) (GPT-2)",
                "check before the next run: lamina preflight",
            ),
            claims=("peri-init", "fuse-init", "mix-init"),
        ),
        Cause(
            name="equal rewards",
            finding="equal rewards within each group from step {step}",
            proofs=("first: equal equal_rewards",),
            meaning="Equal rewards make every advantage 0, so the policy cannot learn. No layer is at fault.",
            check="print the completions of one group with their rewards",
            changes=(
                "check the reward function: if it finds no answer in any completion, all completions get the "
                "same reward",
                "choose prompts that the policy sometimes solves, or generate more completions for each prompt",
                "leave out groups with equal rewards (DAPO's dynamic sampling, arXiv 2503.14476, Sec 3.2)",
            ),
        ),
        Cause(
            name="policy drift",
            finding="a policy far from its reference model, from step {step} on",
            proofs=("then drift policy_kl: yes",),
            meaning="The policy generates tokens that its reference model hardly ever generates.",
            check="read completions of step {step}: do they earn rewards without solving the task?",
            changes=(
                "lower the learning rate",
                "raise beta, the weight of the KL penalty",
                "continue from a checkpoint before step {step}",
            ),
        ),
        Cause(
            name="entropy collapse",
            finding="the policy's entropy collapsed from step {step}",
            proofs=("first: collapse policy_entropy",),
            meaning="The policy generates nearly the same completions each time, so it cannot find better completions.",
            check="generate 8 completions of one prompt, and count how many differ",
            changes=(
                "raise the upper clip limit (epsilon_high=0.28 in TRL; DAPO, arXiv 2503.14476, Sec 3.1)",
                "add an entropy bonus (entropy_coef in TRL's GRPO) or raise the temperature",
                "lower the learning rate",
            ),
        ),
        Cause(
            name="completions cut",
            finding="completions at the length limit from step {step}",
            proofs=("first: cut cut_completions",),
            meaning="Completions do not end before max_completion_length, so most contain no answer to reward.",
            check="read completions of step {step}: do they repeat themselves, or are they only long?",
            changes=(
                "raise max_completion_length if the completions are long but do not repeat themselves",
                "leave cut completions out of the loss (mask_truncated_completions=True in TRL)",
                "lower the reward of completions near the length limit (DAPO, arXiv 2503.14476, Sec 3.4)",
            ),
        ),
    )
}


OF_POLICIES = ("equal rewards", "policy drift", "entropy collapse", "completions cut")
"""Causes in reinforcement learning. A trainer's log can show these causes without records by layer."""


_FAMILIES = {
    "step_gradient_norm": "gradient",
    "gradient_norm": "gradient",
    "without_gradient": "gradient",
    "first_moment": "gradient",
    "hidden_abs_max": "stream",
    "hidden_variance": "stream",
    "gain_abs_max": "gain",
    "gain_mean": "size",
    "row_norm_mean": "size",
    "weight_norm": "size",
    "written_ratio": "size",
}


def _kind(alarm: Alarm) -> str:
    if alarm.rule == "not_finite":  # it is everywhere soon
        return alarm.rule
    return f"{alarm.rule} {_FAMILIES.get(alarm.metric, alarm.metric)}"


def signature(signs: Signs) -> dict[str, str]:
    """Return a run's signs: the alarms, the loss and the learning rate in words. Raises ValueError without alarms."""
    if signs.first is None:
        raise ValueError("no alarm")
    first, signs = signs.counted.alarms[signs.alarms.index(signs.first)], signs.counted
    with_it = [alarm for alarm in signs.alarms if first.step <= alarm.step <= first.step + STEPS]
    at_once = {alarm.layer for alarm in with_it if alarm.step <= first.step + START}
    inside = {layer for layer in at_once if layer >= 0}
    jump = _jump(signs.losses, first.step)
    return {
        "first": _kind(first),
        "telling": next((rule for rule in TELLING if any(alarm.rule == rule for alarm in with_it)), "none"),
        "where": "inside" if first.layer >= 0 else first.role,
        "sublayer": first.sublayer,
        "when": "start" if first.step <= START else "later",
        "layers": "none" if not inside else "one" if len(inside) == 1 else "several",
        "loss": _loss_around(signs.losses, first.step),
        "rate": _rate_around(signs.rates, first.step),
        **({} if signs.half is None else {"half": str(signs.half)}),
        AFTER: "long" if max(signs.losses, default=0) >= first.step + STEPS // 2 else "short",
        **({"jump": jump} if jump else {}),
    } | {f"{_THEN}{_kind(alarm)}": "yes" for alarm in with_it}


def _rate_around(rates: Mapping[int, float], step: int) -> str:
    """Return whether the learning rate "jumped" (rose more than threefold at once), has "grown", or is "level"."""
    before = sorted(at for at in rates if at < step + EVENT)
    values = [rates[at] for at in before]
    if len(values) < 2:
        return "unknown"
    for at in range(3, len(values)):
        last = values[at - 3 : at]
        begun = step - EVENT // 2 <= before[at] <= step + FOLLOWS
        if begun and last[-1] > 0 and last[-1] <= GROWN * last[0] and values[at] > JUMPED * last[-1]:
            return "jumped"
    return "grown" if values[-1] > GROWN * min(values[-3:]) else "level"


def rate_jump(signs: Signs, step: int | None = None) -> tuple[int, float, float] | None:
    """Return the step at which the learning rate jumped near ``step`` (or the first alarm), and both rates, or None."""
    step = signs.first.step if step is None and signs.first is not None else step
    number = step if step is None or not signs.clock else bisect_right(sorted(signs.clock), step)
    if step is None or number is None or _rate_around(signs.counted.rates, number) != "jumped":
        return None
    rates = sorted(signs.rates.items())
    pairs = [(later, rate, high) for (_, rate), (later, high) in pairwise(rates) if high > JUMPED * rate > 0]
    return min(pairs, key=lambda pair: abs(pair[0] - step), default=None)


def _loss_around(losses: Mapping[int, float], step: int) -> str:
    before = [losses[at] for at in sorted(losses) if at < step][-_AROUND[0] :]
    after = [losses[at] for at in sorted(losses) if at >= step][: _AROUND[1]]
    if not all(map(math.isfinite, after)):
        return "not finite"
    if len(before) < _AROUND[1] or not after:
        return "unknown"
    moved = statistics.median(after) - statistics.median(before)
    limit = max(NATS, NOISES * noise_of(before) / math.sqrt(_AROUND[1]))
    return "up" if moved > limit else "down" if moved < -limit else "level"


def _jump(losses: Mapping[int, float], step: int) -> str:
    """Return what the loss did after it jumped at a step, or "" for too few losses.

    ``back``: the loss fell back, as after a bad batch.
    ``stays``: the loss stayed up, as on other data.
    ``again``: the loss rose again, as after a change of the weights.
    ``no``: the loss did not jump.
    """
    before = [losses[at] for at in sorted(losses) if at < step][-_AROUND[0] :]
    after = [losses[at] for at in sorted(losses) if at >= step][: _AROUND[0]]
    if len(before) < _AROUND[1] or len(after) < _AROUND[0] or not all(map(math.isfinite, after)):
        return ""
    usual, level = statistics.median(before), statistics.median(after[:3])
    jump = level - usual
    if jump < max(NATS, NOISES * noise_of(before)):
        return "no"
    falls = max(earlier - later for earlier, later in pairwise(after))
    course = [statistics.median(after[at : at + 3]) for at in range(1, len(after) - 2)]
    again = max(later - min(course[: at + 1]) for at, later in enumerate(course))
    return "back" if falls > jump / 2 else "again" if again > jump / 3 else "stays"


@dataclass(kw_only=True)
class Learned:
    """How often each cause showed each sign, in runs that we broke on purpose."""

    runs: Counter[str] = field(default_factory=Counter)  # the number of runs, by cause
    seen: dict[str, Counter[str]] = field(default_factory=dict)  # the number of runs with a sign, by cause and sign
    temper: float = TEMPER  # the divisor of the log-likelihoods of signs that depend on each other
    sharp: float = 1.0  # the divisor of each cause's total log-likelihood
    added: float = 1.0  # the number of pseudo-runs per cause for additive smoothing

    @classmethod
    def read(cls, view: str = "") -> Learned:
        """Read the counts for Lamina's records or, with ``view``, for one kind of other tools' records."""
        record: Json = read_json(HISTORIES)["views"][view] if view else {"signatures": calibration()["signatures"]}
        signatures = record["signatures"]
        return cls(
            runs=Counter({cause: signature["runs"] for cause, signature in signatures.items()}),
            seen={cause: Counter(signature["signs"]) for cause, signature in signatures.items()},
            temper=record.get("temper", TEMPER),
            sharp=record.get("sharp", 1.0),
            added=record.get("added", 1.0),
        )

    def to_dict(self) -> Json:
        return {
            cause: {"runs": runs, "signs": dict(sorted(self.seen[cause].items()))}
            for cause, runs in sorted(self.runs.items())
        }

    def see(self, cause: str, signs: Mapping[str, str]) -> None:
        self.runs[cause] += 1
        self.seen.setdefault(cause, Counter()).update(
            f"{name}: {value}" for name, value in signs.items() if name != AFTER
        )

    def odds(self, signs: Mapping[str, str]) -> dict[str, float]:
        """Return the probability of each cause, most likely cause first.

        Lamina uses naive Bayes with equal priors and additive smoothing, and divides the log-likelihoods of signs that
        depend on each other. An unknown learning rate and an unknown number format do not count.
        """
        values: dict[str, set[str]] = {}
        for counts in self.seen.values():
            for sign in counts:
                name, _, value = sign.partition(": ")
                values.setdefault(name, set()).add(value)
        scores = dict.fromkeys((*self.runs, NOT_KNOWN), 0.0)
        for name, possible in values.items():
            if name not in signs and (signs.get(AFTER) == "short" or name == "jump"):
                continue
            count = max(2, len(possible) + 1)
            value = signs.get(name, "no" if name.startswith(_THEN) else "unknown")
            if value == "unknown" and name in ("rate", "half"):
                continue
            shares: dict[str, float] = {}
            for cause, runs in self.runs.items():  # only what is there was counted
                of = self.seen[cause]
                times = (
                    runs - of[f"{name}: yes"] if name.startswith(_THEN) and value == "no" else of[f"{name}: {value}"]
                )
                shares[cause] = (times + self.added / count) / (runs + self.added)
            shares[NOT_KNOWN] = (statistics.fmean(shares.values()) + 1 / count) / 2
            for cause, share in shares.items():
                scores[cause] += math.log(share) / (1.0 if name in ALONE else self.temper)
        highest = max(scores.values())
        parts = {cause: math.exp((score - highest) / self.sharp) for cause, score in scores.items()}
        return {cause: part / sum(parts.values()) for cause, part in sorted(parts.items(), key=lambda pair: -pair[1])}


def causes_of(signs: Signs, learned: Learned | None = None) -> list[tuple[str, float]]:
    """Return one or two likely causes of the first alarm with their probabilities, or only "not known"."""
    if signs.first is None:
        return []
    (best, share), *runners_up = possible_causes(signs, learned)
    if best == NOT_KNOWN or (signs.view and share < LEAST):
        return [(NOT_KNOWN, share)]
    if signs.half is not False and (same := CAUSES[best].in_half):
        pair = [(same, share / 2), (best, share / 2)]  # the record does not tell them apart
        return pair if signs.half else pair[::-1]
    second = [(cause, part) for cause, part in runners_up if cause != NOT_KNOWN and part >= SECOND]
    return [(best, share), *second[:1]]


def possible_causes(signs: Signs, learned: Learned | None = None) -> list[tuple[str, float]]:
    """Return "not known" and the causes that the record does not exclude, with probabilities, most likely first."""
    factors = signature(signs)
    odds = (Learned.read(signs.view) if learned is None else learned).odds(factors)
    seen = {f"{name}: {value}" for name, value in factors.items()}
    # What the record itself says needs no counts.
    odds |= {name: 0.0 for name, cause in CAUSES.items() if name not in odds and seen & {*cause.proofs}}
    proved = {cause for cause in odds if cause != NOT_KNOWN and seen & {*CAUSES[cause].proofs}}
    possible = {
        cause: part
        for cause, part in odds.items()
        if (cause in proved if proved else cause == NOT_KNOWN or not seen & {*CAUSES[cause].unlike})
        and (cause == NOT_KNOWN or _may_be(CAUSES[cause], seen, signs))
    }
    total = sum(possible.values())
    return [(cause, part / total if total else 1.0) for cause, part in possible.items()]


def _may_be(cause: Cause, seen: Set[str], signs: Signs) -> bool:
    """Return whether the records of a run are enough to name this cause."""
    recorded = (not cause.needs or signs.holds(cause.needs)) and signs.settings.get(cause.needs_setting) != 0
    return recorded and (bool(signs.view) or not cause.shown or bool(seen & {*cause.shown}))


def open_changes(cause: Cause, settings: Json) -> list[str]:
    """Return the changes that help and that the run's settings do not contain yet, most useful change first."""
    changes = [c if isinstance(c, Change) else Change(text=c) for c in cause.changes]
    return [change.text for change in changes if not change.is_made(settings)]
