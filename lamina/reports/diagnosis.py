"""A diagnosis: the alarm that came first, its likely cause, and what papers and Lamina's own studies say to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_json, read_result, read_yaml
from lamina.jobs.names import CONFIG
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.status import Status
from lamina.reports import charts
from lamina.reports.charts import Line
from lamina.reports.metrics import METRICS
from lamina.reports.page import Section, figure, sentence, write_page
from lamina.reports.records import Frame, Trial, read_run
from lamina.reports.style import polish
from lamina.training.monitor.alarms import (
    AFTER,
    BEFORE,
    FACTORS,
    NOTABLE,
    Alarm,
    describe,
    events,
    first_before,
    read_alarms,
    risen,
)
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.writers import read_about

logger = logging.getLogger(__name__)


_TIMES = 3.0  # the largest recorded update at every step, all in one direction
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


def jump_around(rows: Frame, step: int) -> Jump | None:
    """Return the largest jump from before ``step`` to ``step`` or later; None if there is none.

    A record's weights are those before its update.
    """
    inside = rows[(rows["layer"] >= 0) & (rows["sublayer"] != "block") & (rows["role"] == "all")]
    inside = inside[inside["metric"].isin(["weight_norm", "update_norm"])]
    found: list[tuple[float, Jump]] = []
    for (layer, sublayer), group in inside.groupby(["layer", "sublayer"]):
        table = group.pivot_table(index="step", columns="metric", values="value", aggfunc="last")
        if "weight_norm" not in table:  # none is a number
            continue
        norms = table["weight_norm"].dropna()
        earlier, later = norms[norms.index < step], norms[norms.index >= step]
        if earlier.empty or later.empty:
            continue
        start, end, before, after = earlier.index[-1], later.index[0], float(earlier.iloc[-1]), float(later.iloc[0])
        updates = table.get("update_norm", norms * 0.0).reindex([start, end]).fillna(0.0)
        change = abs(after - before)
        if change > _TIMES * (end - start) * float(updates.max()) and change > _SHARE * before:
            low, high = sorted((before, after))
            jump = Jump(start=start, end=end, layer=int(layer), sublayer=sublayer, before=before, after=after)
            found.append((high / low if low > 0 else math.inf, jump))
    return max(found, key=lambda pair: pair[0], default=(0.0, None))[1]


_SLOW, _PATIENCE = 0.5, 20  # nats above its best, and steps for which a loss that has risen slowly stays there
_LASTS = 8  # steps for which a series must stay up to be more than a batch


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run's records show.

    Attributes:
        trial: the run's records.
        alarms: oldest first; of one step the one that explains most first.
        notable: batches whose gradient stood out, and that nothing followed.
        rose: the first step at which the loss had risen; None if it never did.
        status: from result.json.
        steps: the last recorded step.
        names: the layers' paths in the model.
        half: whether the model computes in float16.
        settings: of the run, as its config.yaml says them, and what was seen of a watched training's.
    """

    trial: Trial
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
        rows = self.trial.layers
        for column in ("layer", "sublayer", "role", "metric"):
            rows = rows[rows[column] == getattr(alarm, column)]
        later = rows[rows["step"] > alarm.step].groupby("step")["value"].last()
        limit = alarm.usual * FACTORS.get(alarm.metric, 1.0)
        for step, value in later.items():
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
    about = read_about(folder)
    trial = read_run(folder).trials[0]
    rows = trial.layers
    if rows.empty:
        raise UserError(
            f"run: {str(folder)!r} has no records by layer (allowed: the folder of lamina pretrain, sft, ..., of "
            "lamina.LayerMonitor or of lamina.watch)"
        )
    result = read_result(folder) or {}
    try:
        settings = read_yaml(folder / CONFIG)
    except UserError:
        settings = {}
    told = sorted(read_alarms(folder), key=lambda alarm: alarm.order)
    status, rose = str(result.get("status") or "unfinished"), loss_rise(losses_of(trial))
    if rose is None and status == Status.DIVERGED:  # as the guard saw it
        rose = next((record["step"] for record in RunFolder(folder).metrics if "diverged" in record), None)
    return Evidence(
        trial=trial,
        alarms=tuple(alarm for alarm in told if alarm.rule != NOTABLE),
        notable=tuple(alarm for alarm in told if alarm.rule == NOTABLE),
        rose=rose,
        status=status,
        steps=int(rows["step"].max()),
        names={index: str(layer.get("path", "")) for index, layer in enumerate(about.get("layers", ()))},
        half=bool(about.get("half")) or settings.get("precision") == "fp16",
        settings={**(seen if isinstance(seen := about.get("settings"), dict) else {}), **settings},
    )


def losses_of(trial: Trial) -> dict[int, float]:
    """Return the training loss by step, of every recorded step, or else of the logged steps."""
    rows = trial.layers
    series = rows[rows["metric"] == "step_loss"].groupby("step")["value"].last()
    if series.empty:
        logged = trial.metrics
        series = logged[logged["loss"].notna()].groupby("step")["loss"].last()
    return {int(step): float(value) for step, value in series.items()}


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
    return None if evidence.first is None else jump_around(evidence.trial.layers, evidence.first.step)


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
        rows = evidence.trial.layers
        steps = rows.loc[rows["metric"] == "weight_norm", "step"]
        grown = steps.empty or first.step > steps.min()
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


PAGE = "diagnosis.html"
_SHOWN = 12  # alarms
_COLORS = ("#b3261e", "#c98f1e", "#3d6fb4")


def diagnose(folder: Path) -> tuple[list[str], Path]:
    """Diagnose a run: sentences for the terminal, and the path of the page that was written.

    Raises UserError for a folder without records by layer, or with records of another version.
    """
    evidence = gather(folder)
    cause = cause_of(evidence)
    return sentences(evidence, cause), write(Path(folder), evidence, cause)


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


def write(folder: Path, evidence: Evidence, cause: Cause | None) -> Path:
    """Write diagnosis.html."""
    texts = "".join(f"<p>{escape(text)}</p>" for text in sentences(evidence, cause))
    losses = losses_of(evidence.trial)
    steps = sorted(losses)
    course = _drawn(evidence, [("loss", _COLORS[2], steps, [losses[step] for step in steps])], "loss")
    html = figure(
        course if losses else None, "Training loss of every step. Red: where the loss rose; orange: the first alarm."
    )
    if (first := evidence.first) is not None:
        quantity = sentence(METRICS[first.metric].quantity)
        caption = f"{quantity} of the sub-layer that left first, and of the same sub-layers of the other layers (gray)."
        html += figure(_series_figure(evidence, first), escape(caption))
    groups = events(evidence.alarms)
    listed = "".join(
        f"<li>{escape(describe(group[0]))}{f' (and {len(group) - 1} more series)' * (len(group) > 1)}</li>"
        for group in groups[:_SHOWN]
    )
    more = len(groups) - _SHOWN
    listed += f"<li>and {more} more</li>" if more > 0 else ""
    return write_page(
        folder / PAGE,
        title=f"Diagnosis of {folder.resolve().name}",
        facts=[f"status: {evidence.status}", f"{len(groups)} alarm{'s' * (len(groups) != 1)}"],
        command=f"lamina diagnose {folder}",
        sections=[
            Section(name="Diagnosis", title="What happened, and what to change", html=texts),
            Section(name="Figures", title="What shows it", html=html),
            Section(name="Alarms", title="Alarms by step", html=f"<ol>{listed}</ol>" if listed else ""),
        ],
    )


def _series_figure(evidence: Evidence, first: Alarm) -> go.Figure | None:
    rows = evidence.trial.layers
    rows = rows[(rows["metric"] == first.metric) & (rows["role"] == first.role) & (rows["index"] == 0)]
    rows = rows[rows["sublayer"] == first.sublayer]
    lines = []
    for layer, group in sorted(rows.groupby("layer"), key=lambda pair: pair[0] == first.layer):
        group = group.sort_values("step")
        color = _COLORS[0] if layer == first.layer else "#b9bcc2"
        lines.append((f"layer {layer}", color, group["step"].to_list(), group["value"].to_list()))
    if not lines:
        return None
    picture = _drawn(evidence, lines, METRICS[first.metric].quantity)
    picture.update_layout(showlegend=False)  # the caption says which is which, a layer's name stands at its points
    return charts.log_axis(picture)


def _drawn(evidence: Evidence, lines: list[tuple[str, str, list[int], list[float]]], quantity: str) -> go.Figure:
    """A figure of ``lines``, each a name, a color, steps and values, and marks at the rise and the alarm."""
    picture = go.Figure()
    for name, color, steps, values in lines:
        Line(
            x=np.asarray(steps),
            y=np.asarray(values, dtype=np.float32),
            color=color,
            width=1.6,
            name=name,
            hover=f"{name}, step %{{x}}: %{{y:.4g}}",
        ).draw(picture)
    for step, color in ((evidence.rose, _COLORS[0]), (evidence.first.step if evidence.first else None, _COLORS[1])):
        if step is not None:
            picture.add_vline(x=step, line={"color": color, "width": 1.2, "dash": "dash"})
    return polish(picture.update_xaxes(title="step").update_yaxes(title=quantity), 340)
