"""A diagnosis: the alarm that came first, its likely cause, and what papers and Lamina's own studies say to change.

Needs neither pandas nor plotly, nor what reads Parquet: ``pages.diagnosis`` draws the page.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_json, read_result, read_yaml
from lamina.jobs.names import CONFIG
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.status import Status
from lamina.training.monitor.alarms import (
    AFTER,
    BEFORE,
    FACTORS,
    NOTABLE,
    Alarm,
    describe,
    first_before,
    read_alarms,
    risen,
)
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.writers import LOSS, NORM, Row, read_about, read_rows

logger = logging.getLogger(__name__)


_TIMES = 3.0  # the largest recorded update at every step, all in one direction
_WEIGHTS = ("weight_norm", "update_norm")
_SHARE = 0.5  # of the weights' norm that must have come or gone


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A sub-layer's weights before and behind a jump.

    Attributes:
        start, end: the steps of the two records; the jump lies between them.
        layer, sublayer: whose weights.
        before, after: the weights' norm.
    """

    start: int
    end: int
    layer: int
    sublayer: str
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"Between steps {self.start} and {self.end} the norm of the weights of layer {self.layer} "
            f"({self.sublayer.replace('_', '-')}) went from {self.before:.3g} to {self.after:.3g}."
        )


def jump_around(rows: Iterable[Row], step: int) -> Jump | None:
    """Return the largest jump of weights from before ``step`` to ``step`` or later; None if there is none.

    A record's weights are those before its update.
    """
    places: dict[tuple[int, str], dict[str, dict[int, float]]] = {}
    for at, layer, sublayer, role, _, metric, value in rows:
        if layer >= 0 and sublayer != "block" and role == "all" and not math.isnan(value):
            places.setdefault((layer, sublayer), {}).setdefault(metric, {})[at] = value
    found: list[tuple[float, Jump]] = []
    for (layer, sublayer), series in places.items():
        norms, updates = series.get("weight_norm", {}), series.get("update_norm", {})
        start = max((at for at in norms if at < step), default=None)
        end = min((at for at in norms if at >= step), default=None)
        if start is None or end is None:
            continue
        before, after = norms[start], norms[end]
        change, largest = abs(after - before), max(updates.get(start, 0.0), updates.get(end, 0.0))
        if change > _TIMES * (end - start) * largest and change > _SHARE * before:
            low, high = sorted((before, after))
            jump = Jump(start=start, end=end, layer=layer, sublayer=sublayer, before=before, after=after)
            found.append((high / low if low > 0 else math.inf, jump))
    return max(found, key=lambda pair: pair[0], default=(0.0, None))[1]


_SLOW, _PATIENCE = 0.5, 20  # nats above its best, and steps for which a loss that has risen slowly stays there
_LASTS = 8  # steps for which a series must stay up to be more than a batch


Rows: TypeAlias = Callable[[Sequence[str]], list[Row]]
"""Returns a run's rows of these metrics."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run's records show.

    Attributes:
        rows: returns the run's rows of some metrics, by step.
        losses: by step, of every recorded step, or else of the logged steps.
        alarms: oldest first; of one step the one that explains most first.
        notable: batches whose gradient stood out, and that nothing followed.
        rose: the first step at which the loss had risen; None if it never did.
        status: from result.json.
        steps: the last recorded step.
        names: the layers' paths in the model.
        half: whether the model computes in float16.
        settings: of the run, as its config.yaml says them, and what was seen of a watched training's.
    """

    rows: Rows
    losses: Mapping[int, float]
    alarms: tuple[Alarm, ...]
    notable: tuple[Alarm, ...]
    rose: int | None
    status: str
    steps: int
    names: Mapping[int, str]
    half: bool = False
    settings: Json = field(default_factory=dict)

    @property
    def first(self) -> Alarm | None:
        """Return the alarm that explains most (``first_before``)."""
        return first_before(self.alarms, self.rose)

    def lasts(self, alarm: Alarm) -> bool:
        """Whether a series that rose was still up in all records of the next 8 steps, and the first one after them,
        before the loss rose: a single batch does not do that.
        """
        series = (alarm.layer, alarm.sublayer, alarm.role)
        later = {row[0]: row[6] for row in self.rows([alarm.metric]) if row[1:4] == series and row[0] > alarm.step}
        limit = alarm.usual * FACTORS.get(alarm.metric, 1.0)
        for step, value in sorted(later.items()):
            if (self.rose is not None and step >= self.rose) or not value > limit:
                return False
            if step >= alarm.step + _LASTS:
                return True
        return False

    @property
    def lead(self) -> int | None:
        """How many steps the first alarm came before the loss rose."""
        return None if self.rose is None or self.first is None else self.rose - self.first.step


def gather(folder: Path) -> Evidence:
    """Read a run's folder. Raises UserError if it has no records by layer, or records of another version."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"run: {str(folder)!r} is not a folder (allowed: a run of Lamina's, or one that was watched)")
    about, rows = read_about(folder), partial(read_rows, folder)
    every = rows([LOSS, NORM, "gradient_norm", "hidden_variance"])
    if not every:
        raise UserError(
            f"run: {str(folder)!r} has no records by layer (allowed: the folder of lamina pretrain, sft, ..., of "
            "lamina.LayerMonitor or of lamina.watch)"
        )
    result = read_result(folder) or {}
    try:
        settings = read_yaml(folder / CONFIG)
    except UserError:
        settings = {}
    told, logged = sorted(read_alarms(folder), key=lambda alarm: alarm.order), RunFolder(folder).metrics
    losses = {row[0]: row[6] for row in every if row[5] == LOSS} or {
        record["step"]: float(record["loss"]) for record in logged if isinstance(record.get("loss"), int | float)
    }
    status, rose = str(result.get("status") or "unfinished"), loss_rise(losses)
    if rose is None and status == Status.DIVERGED:  # as the guard saw it
        rose = next((record["step"] for record in logged if "diverged" in record), None)
    return Evidence(
        rows=rows,
        losses=losses,
        alarms=tuple(alarm for alarm in told if alarm.rule != NOTABLE),
        notable=tuple(alarm for alarm in told if alarm.rule == NOTABLE),
        rose=rose,
        status=status,
        steps=max(row[0] for row in every),
        names={index: str(layer.get("path", "")) for index, layer in enumerate(about.get("layers", ()))},
        half=bool(about.get("half")) or settings.get("precision") == "fp16",
        settings={**(seen if isinstance(seen := about.get("settings"), dict) else {}), **settings},
    )


def loss_rise(losses: Mapping[int, float]) -> int | None:
    """Return the first step at which a loss rose and stayed up, or was not finite; None if it never did.

    It has risen at once where the next 3 losses lie above those before (``risen``), and slowly where it stays for 20
    steps above its best by 0.5 nats and its noise, as the guard judges it.
    """
    steps, guard = sorted(losses), DivergenceGuard(margin=_SLOW, patience=_PATIENCE)
    values = [losses[step] for step in steps]
    for place, step in enumerate(steps):
        before, after = values[max(0, place - BEFORE) : place], values[place : place + AFTER]
        if not math.isfinite(values[place]) or risen(before, after):
            return step if guard.above_since is None else guard.above_since
        try:
            guard.see_loss(step, values[place])
        except Diverged:
            return guard.above_since
    return None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that a run may already have: its ``setting`` is ``made``, or above 0 and at most this number."""

    text: str
    setting: str = ""
    made: str | float | None = None

    def is_made(self, settings: Json) -> bool:
        """Whether the run was made with it."""
        value = settings.get(self.setting)
        if isinstance(self.made, float):
            return isinstance(value, int | float) and 0 < value <= self.made
        return self.made is not None and value == self.made


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A kind of failure.

    Attributes:
        name: a few words.
        meaning: what happens in it.
        changes: what to change, most promising first, each with its source.
        claims: studies of Lamina's own that tested one of these changes.
    """

    name: str
    meaning: str
    changes: tuple[str | Change, ...]
    claims: tuple[str, ...] = ()


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            name="number range",
            meaning="Values left the range of the number format before the loss showed it.",
            changes=(
                Change(
                    text="train in bfloat16 (--precision bf16): it has float32's range",
                    setting="precision",
                    made="bf16",
                ),
                "put a norm on each sub-layer's output (Peri-LN, arXiv 2502.02732, Fig 11: its activations stay inside "
                "float16 where Pre-LN's leave it)",
                "lower the learning rate: largest magnitudes grow with it",
            ),
            claims=("peri-fp16", "peri-growth"),
        ),
        Cause(
            name="values that are not finite",
            meaning="They came at once: from a batch, a weight, or one operation (0/0, log 0), not from growth.",
            changes=(
                "look at that step's batch: values that are not finite, an example without a label (a mean over none)",
                "torch.autograd.set_detect_anomaly(True) names the operation, with the same batch and weights",
                "leave such steps out: lamina.watch(..., skip_outliers=6) does",
            ),
        ),
        Cause(
            name="weights changed",
            meaning="Between two records a layer's weights changed by far more than the recorded updates: something "
            "else than the usual steps wrote to them.",
            changes=(
                "compare the layer's weights with the last checkpoint before it: a layer or a norm's gain that was "
                "edited, loaded or initialized meanwhile",
                "if nothing did, look for one huge step (lamina.watch(..., every=1) records them all), or for faulty "
                "memory",
            ),
        ),
        Cause(
            name="learning rate too high",
            meaning="The optimizer moves the weights of a layer much further than before, and the stream follows.",
            changes=(
                "lower the peak learning rate by a factor of 2 to 3, or find the limit with lamina max-lr",
                "lengthen the warm-up (Peri-LN, App G.1)",
                Change(
                    text="beta2 of 0.95 instead of 0.999: the second moment then forgets a calm time sooner, and a "
                    "burst of gradients makes smaller updates",
                    setting="beta2",
                    made=0.95,
                ),
                "a placement that tolerates higher rates (Peri-LN, Keel): lamina compare on your text",
            ),
            claims=("peri-lr", "keel-maxlr", "peri-budget"),
        ),
        Cause(
            name="attention logits",
            meaning="Attention looks at single tokens: its softmax saturates and its gradient vanishes.",
            changes=(
                "norms on queries and keys (Dehghani et al. 2023, arXiv 2302.05442; QK-norm)",
                "lower the learning rate, or raise weight decay on the query and key projections",
            ),
            claims=("peri-qk",),
        ),
        Cause(
            name="bad batch",
            meaning="One step's gradient stood out while the layers' states and updates were as usual before it.",
            changes=(
                "look at that step's batch: repeated text, wrong labels, another language or format",
                "skip outliers: lamina.watch(..., skip_outliers=6) (OLMo-core's SkipStepOptimizer)",
                Change(text="clip the gradient's norm (max_grad_norm=1.0)", setting="max_grad_norm", made=1.0),
                "go back to a checkpoint before it and skip the data, as PaLM did (arXiv 2204.02311, Sec 5.1); "
                "--rollback does in lamina pretrain",
            ),
            claims=("peri-instability",),
        ),
        Cause(
            name="dead layer",
            meaning="A sub-layer receives no gradient: it is cut off, frozen, or all its units are off.",
            changes=(
                "see whether its parameters require gradients and are in the optimizer",
                "see whether its output reaches the stream: a gain, gate or output projection of zero on both sides "
                "stays zero",
                "start its weights anew, with the initializer of the other layers",
            ),
        ),
        Cause(
            name="initialization",
            meaning="A layer differed from its peers by an order of magnitude from the first steps on.",
            changes=(
                "give it the initializer of the other layers: lamina.build(..., init=...) does for all of them",
                "scale the output projections by 1/sqrt(2 num_layers) (GPT-2)",
                "ask before the next run: lamina preflight",
            ),
            claims=("peri-init", "fuse-init", "mix-init"),
        ),
    )
}
_RULES = {
    "fp16": "number range",
    "logit": "attention logits",
    "dead": "dead layer",
    "apart": "initialization",
    "rewritten": "learning rate too high",
}
_METRICS = {
    "update_norm": "learning rate too high",
    "first_moment": "learning rate too high",
    "hidden_abs_max": "learning rate too high",
    "hidden_variance": "learning rate too high",
    "attention_logit": "attention logits",
    "gain_abs_max": "learning rate too high",
    "gradient_norm": "bad batch",
}
FINDINGS = Path(__file__).parent / "assets" / "findings.json"
"""The verdicts on the claims of ``CAUSES`` in sentences, written by docs/results.py from the records of studies."""
_START = 3  # steps in which what differs was so from the start


def jump_of(evidence: Evidence) -> Jump | None:
    """Return the jump of weights at the place and time of a run's first alarm."""
    return None if evidence.first is None else jump_around(evidence.rows(_WEIGHTS), evidence.first.step)


def cause_of(evidence: Evidence) -> Cause | None:
    """Return the likely cause of the first alarm; None without one."""
    cause = _cause_of_first(evidence)
    written = cause in (CAUSES["bad batch"], CAUSES["learning rate too high"]) and not evidence.half
    moved = evidence.first is not None and evidence.first.rule == "rewritten"  # the optimizer's own step
    return CAUSES["weights changed"] if written and not moved and jump_of(evidence) else cause


def _cause_of_first(evidence: Evidence) -> Cause | None:
    first = evidence.first
    if first is None:
        return None
    if first.rule == "not_finite":
        return CAUSES["number range" if evidence.half else "values that are not finite"]
    if first.rule == "apart" and first.metric == "weight_norm":
        steps = [row[0] for row in evidence.rows(["weight_norm"])]
        grown = not steps or first.step > min(steps)
        return CAUSES[("number range" if evidence.half else "learning rate too high") if grown else "initialization"]
    if first.rule in _RULES and not (first.rule == "apart" and first.step > _START):
        return CAUSES[_RULES[first.rule]]
    at_once = {a.layer for a in evidence.alarms if a.step == first.step and a.metric == "gradient_norm"}
    if first.metric.endswith("gradient_norm") and len(at_once) != 1:
        return CAUSES["bad batch"]  # many layers at one moment: what they have in common is the batch
    if evidence.half:
        return CAUSES["number range"]
    name = _METRICS.get(first.metric, "learning rate too high")
    return CAUSES["learning rate too high" if name == "bad batch" and evidence.lasts(first) else name]


def open_changes(cause: Cause, settings: Json) -> list[str]:
    """Return the changes that a run with these settings does not have yet, the most promising first."""
    changes = [c if isinstance(c, Change) else Change(text=c) for c in cause.changes]
    return [change.text for change in changes if not change.is_made(settings)]


_SHOWN = 12  # alarms


def sentences(evidence: Evidence, cause: Cause | None) -> list[str]:
    """What left first, in which layer and step, how early it could be seen, and what to change."""
    first, rose = evidence.first, evidence.rose
    status = f"(status: {evidence.status})"
    if rose is None:
        texts = [f"The loss did not rise and stay up in {evidence.steps} steps {status}."]
    else:
        texts = [f"The loss rose at step {rose} of {evidence.steps} {status}."]
    if evidence.notable:
        steps = ", ".join(str(alarm.step) for alarm in evidence.notable[:_SHOWN])
        texts.append(f"Notable batches, whose gradient stood out and that nothing followed: at steps {steps}.")
    if first is None or cause is None:
        texts.append("No layer left its usual range in the records.")
        if rose is not None:
            texts.append("Record more often (every=1) to see what happens between two records.")
        return texts
    name = evidence.names.get(first.layer)
    texts.append(f"What left first: {describe(first)}{f', {name}' if name else ''}.")
    if (lead := evidence.lead) is not None:
        early = f"It could have been seen {lead} step{'s' * (lead > 1)} before the loss rose."
        late = "in the step in which the loss rose" if lead == 0 else "only after the loss rose"
        texts.append(early if lead > 0 else f"It was seen {late}.")
    then: dict[tuple[int, str], str] = {}  # the first alarm of each other sub-layer
    for alarm in evidence.alarms:
        place = (alarm.layer, alarm.sublayer)
        if alarm.step >= first.step and "block" not in place and place != (first.layer, first.sublayer):
            then.setdefault(place, describe(alarm))
    if then:
        texts.append(f"Then: {'; '.join([*then.values()][:3])}.")
    if (jump := jump_of(evidence)) is not None:
        texts.append(str(jump))
    texts.append(f"Likely cause: {cause.name}. {cause.meaning}")
    texts += [f"To change: {change}." for change in open_changes(cause, evidence.settings)]
    findings: dict[str, str] = read_json(FINDINGS)
    return texts + [f"Lamina's own study: {findings[claim]}" for claim in cause.claims if claim in findings]
