"""Write a diagnosis: the likely cause of the first alarm, the evidence, and the changes that help.

This module needs neither pandas nor plotly. ``pages.diagnosis`` draws the page.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from lamina.core.json_types import Json
from lamina.core.text import in_units
from lamina.core.values import in_order, nearby
from lamina.errors import UserError
from lamina.jobs.files import read_config, read_json, read_result
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.seals import refuse_page
from lamina.jobs.status import Status
from lamina.reports.causes import (
    CAUSES,
    JUMPED,
    NOT_KNOWN,
    OF_POLICIES,
    REMAINING,
    START,
    STEPS,
    Cause,
    causes_of,
    open_changes,
    possible_causes,
    rate_jump,
)
from lamina.reports.loss_course import BEFORE, back_at, restarts, rise_begins, rises_of, spikes_of, step_in, wander_of
from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import EVENT, NOTABLE, Alarm, describe, place_in_words, read_alarms, says_where
from lamina.training.monitor.batches import beginning_of, read_batches
from lamina.training.monitor.writers import LOSS, NORM, RATE, Row, by_step, read_about, read_rows

_NO_STATE = "Trainer writes trainer_state.json with its first checkpoint: until then, give Trainer's printed log."
_GIVE = "Give the folder of a run, or another tool's record."
_AT_STEP = re.compile(r",?(?: visible)? (?:at|from) step \{step\}.*")  # in a cause's finding


Rows: TypeAlias = Callable[..., list[Row]]
"""A function that returns a run's rows for some metrics, or only the rows of one sub-layer."""


@dataclass(frozen=True, kw_only=True)
class Evidence(Signs):
    rows: Rows  # returns the run's rows of some metrics, by step
    notable: tuple[Alarm, ...]  # batches with an unusually large gradient that did no harm
    passed_rises: tuple[int, ...] = ()  # the steps of other rises of the loss, after which the loss came back down
    status: str  # the run's status in result.json
    steps: int  # the last step in the record
    names: Mapping[int, str]  # the path of each layer in the model
    epochs: Mapping[int, float] = field(default_factory=dict)  # the epoch by step, if the run recorded epochs
    falls: tuple[int, ...] = ()  # the steps at which the loss fell suddenly, in another tool's record
    opposed: bool = False  # whether the loss is a GAN's, in another tool's record
    batches: Mapping[int, Sequence[Json]] = field(default_factory=dict)  # the rows of the recorded batches, by step
    watched: bool = False  # whether the user's own loop trained the model
    unit: str = "step"  # "step", or "record" if another tool's record has no steps
    lags: bool = False  # whether a progress bar shows the steps of another tool's record

    @property
    def imported(self) -> bool:
        """Whether another tool recorded the run."""
        return bool(self.view)

    def holds(self, metric: str) -> bool:
        """Return whether the run recorded a metric. For another tool's record, the answer is always true."""
        return self.imported or bool(self.rows([metric]))

    def in_units(self, text: str) -> str:
        return in_units(text, self.unit, lags=self.lags)

    @cached_property
    def spikes(self) -> Mapping[int, tuple[float, int | None]]:
        """Return the loss's spikes (``spikes_of``), or {} if the loss rose and stayed up."""
        return spikes_of(self.losses) if self.rose is None and not self.opposed else {}

    @cached_property
    def rise(self) -> int | None:
        """Return the step at which the rise of the loss begins, or None. ``rose`` may come later in the rise."""
        if self.rose is None or not math.isfinite(self.losses.get(self.rose, math.nan)):
            return self.rose
        told = any((alarm.step, alarm.rule, alarm.metric) == (self.rose, "rise", LOSS) for alarm in self.alarms)
        return rise_begins(self.losses, self.rose, summed=told)

    @cached_property
    def anomaly(self) -> Alarm | None:
        """Return the first anomaly: the first alarm, or the rise of the loss if the rise began before this alarm."""
        first, rise = self.first, self.rise
        if first is None or rise is None or rise >= first.step or rise not in self.losses:
            return first
        back, counted = back_at(self.losses, rise), sorted(self.losses)
        late = bisect_left(counted, first.step) - bisect_left(counted, rise) > STEPS
        if first.step != self.rose and (late or (back is not None and back <= first.step)):
            return first
        before = [loss for step, loss in self.losses.items() if step < rise and math.isfinite(loss)][-BEFORE:]
        usual, value = statistics.median(before or [math.nan]), self.losses[rise]
        rule = "rise" if value > usual else "not_finite" if not math.isfinite(value) else ""
        whole = {"layer": -1, "sublayer": "model", "role": "all", "metric": LOSS}
        return Alarm(step=rise, rule=rule, **whole, value=value, usual=usual) if rule else first

    @property
    def lead(self) -> int | None:
        """Return the number of steps from the first anomaly to the rise of the loss, or None."""
        # an earlier spike explains an earlier rise
        if self.rise is None or self.anomaly is None or (self.passed_spike and self.rise < self.anomaly.step):
            return None
        return self.rise - self.anomaly.step


def _no_records(folder: Path) -> UserError:
    runs = in_order(one.name for one in folder.iterdir() if one.is_dir() and kind_of(one) is not None)[-8:]
    some = f", but it holds {', '.join(runs)}" * bool(runs)
    return UserError(f"run: {str(folder)!r} has no records by layer{some}. {_GIVE}{'' if some else f' {_NO_STATE}'}")


def gather(folder: Path) -> Evidence:
    """Read the evidence in a run's folder. Raises UserError if the folder has no records of this version."""
    folder = Path(folder)
    if not folder.is_dir():
        if re.match(r"https?:/", str(folder)):
            raise UserError(f"run: {str(folder)!r} is a web address. Download the history, and give the new file.")
        raise UserError(f"run: {str(folder)!r} does not exist{nearby(folder)}. {_GIVE}")
    refuse_page(folder)
    about, rows = read_about(folder), partial(read_rows, folder)
    history = about.get("history") or {}
    every = rows([LOSS, NORM, RATE, *([EPOCH] if history else [])])
    if not history and not any(row.metric in (LOSS, NORM) for row in every):
        every += rows(["gradient_norm", "hidden_variance"])
    if not every:
        raise _no_records(folder)
    settings: Json = {}
    with suppress(UserError):
        settings = read_config(folder)
    told, logged = sorted(read_alarms(folder), key=lambda alarm: alarm.order), RunFolder(folder).metrics
    losses, rates = (
        by_step(every, metric)
        or {record["step"]: float(record[name]) for record in logged if isinstance(record.get(name), int | float)}
        for metric, name in ((LOSS, "loss"), (RATE, RATE))
    )
    status = str((read_result(folder) or {}).get("status") or "unfinished")
    begin = first if isinstance(first := about.get("first_layer"), int) else 0
    opposed = bool(history.get("opposed"))
    judged = {step: loss for step, loss in losses.items() if not opposed or not math.isfinite(loss)}
    alarms = tuple(alarm for alarm in told if alarm.rule != NOTABLE)
    rose, passed_rises = rises_of(judged, alarms, rates if history else None)
    if rose is None and status == Status.DIVERGED:  # as the guard saw it
        rose = next((record.get("diverged_since", record["step"]) for record in logged if "diverged" in record), None)
    steps, batches = sorted({row.step for row in every if row.metric in (LOSS, NORM)}), dict[int, list[Json]]()
    for line in read_batches(folder):
        batches.setdefault(line["step"], []).append(line)
    apart = statistics.median(later - step for step, later in pairwise(steps)) if len(steps) > 1 else 1
    return Evidence(
        clock={step: number for number, step in enumerate(steps, start=1)} if apart > 1 else {},
        view=_view(history.get("metrics", ())) if history else "",
        falls=tuple(history.get("falls", ())),
        opposed=opposed,
        epochs=by_step(every, EPOCH),
        rows=rows,
        batches=batches,
        watched=kind_of(folder) == Kind.WATCHED,
        unit="record" if history and not history.get("clock") else "step",
        lags=bool(history.get("lags")),
        losses=losses,
        rates=rates,
        norms=by_step(every, NORM),
        alarms=alarms,
        notable=tuple(alarm for alarm in told if alarm.rule == NOTABLE),
        rose=rose,
        passed_rises=passed_rises,
        status=status,
        steps=max(row.step for row in every),
        names={index: str(layer.get("path", "")) for index, layer in enumerate(about.get("layers", ()), begin)},
        half=None if history else bool(about.get("half")) or settings.get("precision") == "fp16",
        settings={**(seen if isinstance(seen := about.get("settings"), dict) else {}), **settings},
    )


def failing_step(folder: Path) -> int | None:
    """Return the step of a run's first anomaly, or None if the run has no anomaly or no records."""
    try:
        first = gather(folder).anomaly
    except UserError:
        return None
    return None if first is None else first.step


def _view(metrics: Collection[str]) -> str:
    """Return the kind of another tool's record (one of ``VIEWS``)."""
    return "layers" if "gradient_norm" in metrics else "norm" if NORM in metrics else "loss"


FINDINGS = Path(__file__).parent / "assets" / "findings.json"
"""A sentence on the verdict of each study that ``CAUSES`` names. docs/results.py writes this file."""
_SHOWN = 12  # alarms
_CHANGES = 3  # at most
_BATCHES, _ROWS = 3, 4  # batches of which the text is shown, and rows of each
_SMALL = (
    "Lamina knows the causes from small models that we broke on purpose, so check the charts before you act "
    "(docs/loss-spiked.md)."
)
_ODDS = "Lamina counted these odds in records of small models that we broke on purpose (docs/loss-spiked.md)."
_EQUAL_ODDS = "Two causes are equally likely"
EPOCH = "epoch"
_JUMPED = next(cause for cause in CAUSES.values() if "rate: jumped" in cause.proofs)
_MOST_OF_HISTORIES = 0.95  # odds: so few histories were judged that no more can be promised
_EQUAL = 3  # equal learning rates before a jump, which no schedule moves
_STAIR = 8  # losses before and after the start of an epoch, at least
_ERRORS = 5.0  # standard errors by which a fall stands out at the start of an epoch


@dataclass(frozen=True)
class Answer:
    """A diagnosis in sentences.

    ``cause``: the likely cause with its step, or a sentence that the cause is not known ("" without an anomaly).
    ``evidence``: how the loss changed, the first anomaly and the next anomalies.
    ``changes``: the changes that help (most useful change first), and how to check the cause.
    ``notes``: other facts, and how far to trust the answer.
    """

    cause: list[str]
    evidence: list[str]
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        return [*self.cause, *self.evidence, *self.changes, *self.notes]


def headline(evidence: Evidence) -> str:
    """Return the finding in one line: the cause, or the first anomaly. An unproven cause is called "likely"."""
    return evidence.in_units(_headline(evidence))


def _headline(evidence: Evidence) -> str:
    first = evidence.anomaly
    if first is None and _jump(evidence) is not None:
        finding = _filled(_JUMPED.finding, evidence, _JUMPED)
        return finding[0].upper() + finding[1:]
    if first is None and evidence.rose is None:
        for spike, (_, back) in evidence.spikes.items():
            return f"The loss spiked at step {spike} and {'is still high at the end' if back is None else 'came back'}"
        return "No problem found"
    if first is None:
        return f"The loss rose at step {evidence.rise}"
    (cause, _), *others = causes = causes_of(evidence)
    if cause != NOT_KNOWN:
        finding = _filled(CAUSES[cause].finding, evidence, CAUSES[cause])
        _, proved, _ = _recorded(evidence, CAUSES[cause])
        if not proved and _are_equal(causes):
            return f"{_EQUAL_ODDS}: {finding}; {_filled(CAUSES[others[0][0]].finding, evidence, CAUSES[others[0][0]])}"
        return finding[0].upper() + finding[1:] if proved else f"Likely cause: {finding}"
    return f"Anomaly at {describe(first)}"


def answer(evidence: Evidence) -> Answer:
    said = _answer(evidence)
    step = evidence.anomaly.step if evidence.anomaly else evidence.rise or next(iter(evidence.spikes), None)
    if step and evidence.unit == "record" and step in evidence.epochs:
        said.notes.append(f"Record {step} is at epoch {evidence.epochs[step]:.4g}.")
    if step and evidence.watched and not evidence.imported:
        said.notes.append(f"Lamina counts steps from 1: a loop that counts from 0 prints step {step} as {step - 1}.")
    parts = (said.cause, said.evidence, said.changes, said.notes)
    return Answer(*([*map(evidence.in_units, texts)] for texts in parts))


def _answer(evidence: Evidence) -> Answer:
    first, rose, spikes = evidence.anomaly, evidence.rise, evidence.spikes
    course = [*_back(evidence, spikes), _course(evidence)] if spikes else [_course(evidence), *_back(evidence, {})]
    course += [*_falls(evidence), *_notable(evidence, spikes)]
    if first is None and _jump(evidence) is not None:
        return _explained(evidence, [(_JUMPED.name, 1.0)], [*course, *_rows(evidence)])
    if first is None:
        found = "nothing else unusual" if spikes or rose is not None else "no anomaly"
        later = "a later" if evidence.alarms else "an"
        finding = f"Lamina found {found} in the record." if evidence.imported else f"No layer has {later} anomaly."
        more = "" if rose is None and not spikes else _more(evidence)
        changes = [f"Record {more} to see the steps between two records."] if more else []
        if evidence.alarms:
            finding = f"An anomaly at step {evidence.alarms[0].step} passed long before. {finding}"
        if rose is not None and math.isfinite(evidence.losses.get(rose, math.nan)):
            finding += " The record does not show why the loss rose."
            changes.insert(0, f"To check: inspect {_unrecorded_rate(evidence)}{_high_batches(evidence, rose)}.")
        if spikes:
            step = next(iter(spikes))
            changes.insert(0, f"To check: inspect {_unrecorded_rate(evidence)}{_batch(evidence, step)}.")
        return Answer(cause=[], evidence=[*course, finding, *_rows(evidence)], changes=changes)
    causes, where = causes_of(evidence), describe(first, evidence.names)
    texts = [f"The first anomaly{' after this' * (rose is not None and rose < first.step)} is at {where}."]
    if (spike := evidence.passed_spike) is not None and spike.step < first.step:
        texts = [f"A spike at step {spike.step} passed by itself. The first anomaly after the spike is at {where}."]
    location, everywhere = evidence.place or first, _everywhere(evidence, first)
    inside = location.layer >= 0 or location.role != "all"
    if _place(location) != _place(first) and says_where(location) and inside and not everywhere:
        texts.append(f"The first anomaly with a location is at {describe(location, evidence.names)}.")
    texts += [*_early(evidence, first), *_next(evidence, first, location), *everywhere]
    if causes[0][0] == NOT_KNOWN:
        record = f", and record {more}" if (more := _more(evidence)) else ""
        look = f"To check: inspect {_unrecorded_rate(evidence)}{_batches(evidence, first)}{record}."
        told = [" ".join(course), " ".join(texts), *_rows(evidence)]
        return Answer(cause=[_not_known(evidence)], evidence=told, changes=[look])
    return _explained(evidence, causes, [course[0], *texts, *course[1:], *_rows(evidence)])


def _unrecorded_rate(evidence: Evidence) -> str:
    return "" if evidence.rates else "the learning rate and "


def _not_known(evidence: Evidence) -> str:
    """Return a sentence with the causes that remain possible."""
    names = [name for name, odds in possible_causes(evidence) if odds >= REMAINING and name != NOT_KNOWN]
    if not names:
        return "The cause is not known: no failure that Lamina knows fits the record."
    remaining = ", ".join(_AT_STEP.sub("", CAUSES[name].finding) for name in names)
    apart = "A record without values by layer does not tell these causes apart" * (evidence.view in ("loss", "norm"))
    told = f"{apart or 'Possible causes are'}: {remaining}, or a failure that Lamina does not know."
    return f"The cause is not known. {told}"


def _explained(evidence: Evidence, causes: Sequence[tuple[str, float]], texts: list[str]) -> Answer:
    """Return the answer for one or two likely causes."""
    told, changes, checks, studies = [], [], [], []
    findings: dict[str, str] = read_json(FINDINGS)
    most = _MOST_OF_HISTORIES if evidence.imported else 0.0
    for number, (name, odds) in enumerate(causes):
        cause = CAUSES[name]
        fact, decided, check = _recorded(evidence, cause)
        settings = {**evidence.settings, **({"skip_outliers": "unknown"} if evidence.imported else {})}
        usual = open_changes(cause, settings)[: _CHANGES - len(causes) + 1 - number]
        changes += [f"To change: {_filled(change, evidence)}." for change in decided or usual]
        checks.append(f"To check: {check or _filled(cause.check, evidence)}.")
        own = not (decided or evidence.imported)  # the studies' models are unlike those of other tools
        studies += [findings[claim] for claim in cause.claims if claim in findings and own]
        likely = "Or" if number else "Cause" if decided else _EQUAL_ODDS if _are_equal(causes) else "Likely cause"
        share = f" (odds {min(odds, most):.0%})" if most and not decided else ""
        told.append(f"{likely}: {_filled(cause.finding, evidence, cause)}{share}. {fact or cause.meaning}")
    how_far = [] if all(text.startswith("Cause") for text in told) else [_ODDS if evidence.imported else _SMALL]
    return Answer(cause=told, evidence=texts, changes=changes + checks, notes=studies + how_far)


def _are_equal(causes: Sequence[tuple[str, float]]) -> bool:
    return len(causes) > 1 and round(100 * causes[0][1]) == round(100 * causes[1][1])


def _recorded(evidence: Evidence, cause: Cause) -> tuple[str, list[str], str]:
    """Return the recorded fact that proves a cause, the changes that undo it, and a check, or empty values."""
    first = evidence.first
    if "rate: jumped" in cause.proofs and (jump := _jump(evidence)) is not None:
        return _of_rate(evidence.rates, *jump)
    if first is None or not cause.proofs:
        return "", [], ""
    if cause.name in OF_POLICIES:
        return cause.meaning, [*open_changes(cause, evidence.settings)], ""
    near = [alarm for alarm in evidence.alarms if first.step <= alarm.step <= first.step + EVENT]
    for alarm in near:
        if cause.name == "labels or data" and alarm.rule == "repeated":
            return (
                "The record shows that the same batch repeats.",
                [f"fix the data loader, which repeats a batch from step {alarm.step} on"],
                "",
            )
        if cause.name == "labels or data" and (alarm.rule, alarm.metric) == ("fall", "label_match"):
            return (
                "The record shows that the labels no longer match the inputs.",
                [f"align the labels with the inputs from step {alarm.step} on (often they are shifted by one token)"],
                "",
            )
        if cause.name == "learning rate too high" and alarm.metric == RATE:
            return (
                f"In the record, the learning rate is {alarm.excess:.3g} times its highest earlier value.",
                [f"fix the schedule, so that the learning rate stays at {alarm.usual:.3g} or below"],
                "",
            )
        if cause.name == "optimizer groups" and alarm.metric == "rate_ratio":
            part = place_in_words(alarm.location)
            return (
                f"In the record, the learning rate of {part} is {alarm.excess:.3g} times the other parameters' "
                "learning rate.",
                [f"give {part} the same learning rate as the other parameters"],
                "",
            )
    return "", [], ""


def _of_rate(rates: Mapping[int, float], step: int, before: float, after: float) -> tuple[str, list[str], str]:
    """Return the fact, the changes and the check (as ``_recorded`` does) for a jump of the learning rate."""
    steps, factor = sorted(rates), after / before
    earlier = steps[: bisect_left(steps, step)][-_EQUAL:]
    level = all(rates[at] == before for at in earlier)  # else a schedule moves the rate
    target = f"the learning rate {before:.3g}" if level else "the schedule's learning rate"
    since = "" if level else f" at step {earlier[-1]}"
    shown = f"{after:.3g} from step {step}" if level else f"{factor:.3g} times the rate of step {earlier[-1]}"
    verb = "restore"
    for last, at in pairwise(at for at in steps if at >= step):
        fell = rates[last] / (rates[at] or math.inf)
        if max(JUMPED, factor / 2) < fell < 2 * factor and rates[at] > before / JUMPED:  # a schedule falls more slowly
            verb = "keep"
            high = f"{rates[last]:.3g} until step {last}" if last > step else f"{after:.3g} at step {step}"
            shown = f"{high}, but {rates[at]:.3g} at step {at}"
            break
    return (
        f"The record shows that the learning rate went from {before:.3g}{since} to {after:.3g} at step {step}.",
        [
            f"{verb} {target} (the record shows {shown})",
            f"continue from a checkpoint before step {step}, because the later updates were too large and damaged the "
            "weights",
        ],
        f"train 50 steps from an earlier checkpoint at {target}: Lamina should raise no alarm",
    )


def _jump(evidence: Evidence) -> tuple[int, float, float] | None:
    """Return the jump of the learning rate before the first anomaly (without an anomaly: before the loss rose)."""
    if evidence.first is not None:
        return rate_jump(evidence)
    rose = next(iter(evidence.spikes), None) if evidence.rose is None else evidence.rose
    jump = None if rose is None else rate_jump(evidence, rose)
    # a restart of the schedule is no jump
    return None if jump is None or jump[0] in restarts(evidence.rates) else jump


def _filled(text: str, evidence: Evidence, cause: Cause | None = None) -> str:
    """Insert the step and location of the first anomaly into a text, or the step of the learning rate's jump."""
    first, jump = evidence.anomaly, _jump(evidence) if cause is not None and "rate: jumped" in cause.proofs else None
    step = jump[0] if jump is not None else "" if first is None else first.step
    where = "" if first is None else place_in_words((evidence.place or first).location)
    text = text.replace("{batch}", _batches(evidence, first)) if first is not None else text
    return text.replace("{step}", str(step)).replace("{where}", where)


def _batch(evidence: Evidence, step: int, last: int | None = None) -> str:
    """Name the batches from a step to the step ``last``. If the record has gaps, begin after the previous record."""
    before, last = max((earlier for earlier in evidence.losses if earlier < step), default=step - 1), last or step
    if evidence.unit == "record":
        return f"the batches that step {step} covers" if last == step else f"the batches of steps {step} to {last}"
    return f"the batch of step {step}" if last - before <= 1 else f"the batches of steps {before + 1} to {last}"


def _high_batches(evidence: Evidence, rise: int) -> str:
    """Name the batches of the first high losses after a rise, or only one batch if the loss never fell again."""
    before = [loss for step, loss in evidence.losses.items() if step < rise][-BEFORE:] or [0.0]
    middle, last = (statistics.median(before) + evidence.losses[rise]) / 2, rise
    for step in sorted(step for step in evidence.losses if step > rise):
        if not evidence.losses[step] > middle:
            return _batch(evidence, rise, last)
        last = step
    return _batch(evidence, rise)


def _batches(evidence: Evidence, first: Alarm) -> str:
    return _high_batches(evidence, first.step) if first.metric == LOSS else _batch(evidence, first.step)


def _early(evidence: Evidence, first: Alarm) -> list[str]:
    """Return a sentence about how many steps the first anomaly came before the rise of the loss."""
    if (lead := evidence.lead) is None or first.metric == LOSS:
        return []
    did = "rose" if math.isfinite(evidence.losses.get(evidence.rise or 0, 0.0)) else "was not finite"
    if lead == 0:
        return [f"The loss {did} in the anomaly's step."]
    early = f"{lead} {evidence.unit}{'s' * (lead > 1)} before"
    return [f"The anomaly came {early if lead > 0 else 'after'} the loss {did}."]


def _next(evidence: Evidence, first: Alarm, place: Alarm) -> list[str]:
    """Name later anomalies, one for each other location, with the strongest evidence first."""
    then: dict[tuple[int, str, bool], str] = {}
    telling = {alarm: alarm.rule in ("not_finite", "written") for alarm in evidence.alarms}
    for alarm in sorted(evidence.alarms, key=lambda alarm: not telling[alarm]):
        where = (alarm.layer, alarm.sublayer)
        if alarm.step >= first.step and "block" not in where and (telling[alarm] or where != _place(first)):
            then.setdefault((*where, telling[alarm]), describe(alarm))
    then = {where: said for where, said in then.items() if said != describe(place)}
    then.pop((*_place(first), first.rule in ("not_finite", "written")), None)
    if not then:
        return []
    return [f"The next {'anomaly is' if len(then) == 1 else 'anomalies are'} at {'; '.join([*then.values()][:3])}."]


def _everywhere(evidence: Evidence, first: Alarm) -> list[str]:
    """Return a sentence if more than half of the layers have an anomaly within a few steps."""
    at_once = {alarm.layer for alarm in evidence.alarms if 0 <= alarm.step - first.step <= START and alarm.layer >= 0}
    layers = sum(index >= 0 for index in evidence.names)
    if len(at_once) <= max(2, layers // 2):
        return []
    return [f"{len(at_once)} layers have anomalies within {START} steps, so no single layer is at fault."]


def _more(evidence: Evidence) -> str:
    """Return the further steps to record, or "" if the run recorded every step."""
    if evidence.settings.get("every") == 1:
        return ""
    return "every step by layer (lamina.watch with every=1)" if evidence.imported else "every step (every=1)"


def _course(evidence: Evidence) -> str:
    """Return a sentence about what the loss did."""
    rose, status = evidence.rise, "" if evidence.imported else f" (status: {evidence.status})"
    if not evidence.losses:
        return f"The record has no loss, so Lamina cannot tell whether the loss rose{status}."
    steps = sorted(evidence.losses)
    if rose is None and evidence.opposed:
        return "A generator trains against a discriminator, so Lamina judges only whether their losses are finite."
    if rose is None and len(steps) < BEFORE:
        count = "1 loss is" if len(steps) == 1 else f"{len(steps)} losses are"
        return f"{count} too few to see whether the loss rose{status}."
    if rose is None and evidence.imported:
        return f"The loss had no lasting rise in {len(steps):,} records, steps {steps[0]} to {steps[-1]}."
    if rose is None:
        return f"The loss had no lasting rise in {evidence.steps} steps{status}."
    if not math.isfinite(evidence.losses.get(rose, 0.0)):
        again = next((step for step in steps if step > rose and math.isfinite(evidence.losses[step])), None)
        if again is not None:
            return f"The loss is not finite at step {rose} of {evidence.steps}, but finite at step {again}{status}."
        return f"The loss is not finite from step {rose} of {evidence.steps} on{status}."
    return f"The loss rose at step {rose} of {evidence.steps}{status}."


def _back(evidence: Evidence, spikes: Mapping[int, tuple[float, int | None]]) -> list[str]:
    """Return sentences about when the loss came back down and about other rises, or about the spikes of the loss."""
    if evidence.rise is not None:
        back, others = back_at(evidence.losses, evidence.rise), evidence.passed_rises
        course = [] if back is None else [f"The loss was back down by step {back}."]
        shown = f"step{'s' * (len(others) > 1)} {', '.join(map(str, others[:_SHOWN]))}"
        return [*course, *[f"The loss also rose at {shown}, but came back down."] * bool(others)]
    told = [
        f"step {step} (to {highest:.3g}, {'where the record ends' if back is None else f'back at step {back}'})"
        for step, (highest, back) in [*spikes.items()][:_SHOWN]
    ]
    more = f", and {len(spikes) - _SHOWN} more times" if len(spikes) > _SHOWN else ""
    return [f"The loss spiked at {'; '.join(told)}{more}."] if told else []


def _falls(evidence: Evidence) -> list[str]:
    """Return a sentence about sudden falls of the loss, if the loss never rose."""
    if evidence.rose is not None or evidence.opposed:
        return []
    if stairs := epoch_stairs(evidence):
        return [_stairs(stairs)]
    if not evidence.falls:
        return []
    steps = ", ".join(map(str, evidence.falls[:_SHOWN]))
    return [
        f"The loss dropped suddenly at step {steps}. Possible causes are a new epoch, other text or a lower learning "
        "rate. A drop alone is not a failure."
    ]


def _notable(evidence: Evidence, spikes: Collection[int]) -> list[str]:
    if not evidence.notable:
        return []
    steps = [str(alarm.step) for alarm in evidence.notable[:_SHOWN]]
    batches = f"The batch of step {steps[0]} had an unusually large gradient"
    if len(steps) > 1:
        batches = f"The batches of steps {', '.join(steps)} had unusually large gradients"
    after = ", and nothing went wrong afterward"
    harmless = not spikes and evidence.rose is None
    return [f"{batches}{after * harmless}."]


def _rows(evidence: Evidence) -> list[str]:
    """Quote the beginning of each row in the first anomaly's batch, or in the batches of spikes and notable batches."""
    firsts = (evidence.anomaly, evidence.first)
    shown = [alarm for alarm in firsts if alarm is not None and alarm.step in evidence.batches][:1]
    steps = [alarm.step for alarm in shown or evidence.notable]
    steps = dict.fromkeys(step for step in (steps if shown else [*evidence.spikes, *steps]) if step in evidence.batches)
    texts = []
    for step in [*steps][:_BATCHES]:
        rows = evidence.batches[step]
        begin = "; ".join(f"{line['hash']} “{beginning_of(line)}”" for line in rows[:_ROWS])
        more = f" batches.jsonl has all {len(rows)}." if len(rows) > _ROWS else ""
        texts.append(f"The batch of step {step} has these rows (hash and beginning): {begin}.{more}")
    return texts


def epoch_stairs(evidence: Evidence) -> dict[int, int]:
    """Return the first step of each epoch that begins with a fall of the loss."""
    steps = sorted(step for step in evidence.losses if step in evidence.epochs)
    values = [evidence.losses[step] for step in steps]
    whole, epochs = [int(evidence.epochs[step] + 1e-6) for step in steps], {}
    begins = [0, *(at for at in range(1, len(steps)) if whole[at] > whole[at - 1]), len(steps)]
    for first, at, last in zip(begins, begins[1:], begins[2:], strict=False):
        count = min(2 * BEFORE, at - first, last - at)
        rates = [evidence.rates.get(step, 0.0) for step in steps[max(0, at - 2) : at + 2]]
        # the learning rate must not fall at this step
        if count < _STAIR or rates[0] > 1.5 * rates[-1] or not all(map(math.isfinite, values[at - count : at + count])):
            continue
        slope, moved, error = step_in(values[at - count : at + count])
        # the fall exceeds the noise, the drift and the trend
        if -moved > max(0.02, _ERRORS * error, wander_of(values[:at]), abs(slope) * count):
            epochs[whole[at]] = steps[at]
    return epochs


def _stairs(stairs: Mapping[int, int]) -> str:
    told = ", ".join(f"epoch {epoch} at step {step}" for epoch, step in list(stairs.items())[:_SHOWN])
    return (
        f"The loss drops where an epoch begins ({told}), because the model has seen these examples before. This "
        "is not a failure, but watch the loss on held-out text."
    )


def _place(alarm: Alarm) -> tuple[int, str]:
    return alarm.layer, alarm.sublayer
