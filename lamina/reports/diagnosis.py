"""A diagnosis: the alarm that came first, its likely cause, and what papers and Lamina's own studies say to change.

Needs neither pandas nor plotly, nor what reads Parquet: ``pages.diagnosis`` draws the page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lamina.core.json_types import Json
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError
from lamina.jobs.files import read_json, read_result
from lamina.jobs.names import CONFIG
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.status import Status
from lamina.reports.causes import CAUSES, NOT_KNOWN, Signs, causes_of, open_changes
from lamina.training.monitor.alarms import NOTABLE, Alarm, describe, read_alarms, says_where
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.rules import noise_of
from lamina.training.monitor.writers import LOSS, NORM, Row, read_about, read_rows

_SLOW, _PATIENCE = 0.5, 20  # nats above its best, and steps for which a loss that has risen slowly stays there
BEFORE, AFTER = 16, 3  # losses with which others are compared, and how many must lie above them
_NATS, _NOISES = 0.15, 6.0  # by how much: at least this, and this many times their noise


Rows: TypeAlias = Callable[[Sequence[str]], list[Row]]
"""Returns a run's rows of these metrics."""


@dataclass(frozen=True, kw_only=True)
class Evidence(Signs):
    """The evidence in a run's records.

    Attributes:
        rows: returns the run's rows of some metrics, by step.
        notable: batches whose gradient stood out, and that nothing followed.
        status: from result.json.
        steps: the last recorded step.
        names: the layers' paths in the model.
        settings: of the run, as its config.yaml says them, and what was seen of a watched training's.
    """

    rows: Rows
    notable: tuple[Alarm, ...]
    status: str
    steps: int
    names: Mapping[int, str]
    settings: Json = field(default_factory=dict)

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
    every = rows([LOSS, NORM, RATE, "gradient_norm", "hidden_variance"])
    if not every:
        raise UserError(
            f"run: {str(folder)!r} has no records by layer (allowed: the folder of lamina pretrain, sft, ..., of "
            "lamina.LayerMonitor or of lamina.watch)"
        )
    result = read_result(folder) or {}
    try:
        settings = read_mapping(folder / CONFIG)
    except UserError:
        settings = {}
    told, logged = sorted(read_alarms(folder), key=lambda alarm: alarm.order), RunFolder(folder).metrics
    losses, rates = (
        {row[0]: row[6] for row in every if row[5] == metric}
        or {record["step"]: float(record[name]) for record in logged if isinstance(record.get(name), int | float)}
        for metric, name in ((LOSS, "loss"), (RATE, RATE))
    )
    status, rose = str(result.get("status") or "unfinished"), loss_rise(losses, told)
    if rose is None and status == Status.DIVERGED:  # as the guard saw it
        rose = next((record["step"] for record in logged if "diverged" in record), None)
    return Evidence(
        rows=rows,
        losses=losses,
        rates=rates,
        alarms=tuple(alarm for alarm in told if alarm.rule != NOTABLE),
        notable=tuple(alarm for alarm in told if alarm.rule == NOTABLE),
        rose=rose,
        status=status,
        steps=max(row[0] for row in every),
        names={index: str(layer.get("path", "")) for index, layer in enumerate(about.get("layers", ()))},
        half=bool(about.get("half")) or settings.get("precision") == "fp16",
        settings={**(seen if isinstance(seen := about.get("settings"), dict) else {}), **settings},
    )


def risen(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether all losses ``after`` lie above the lower of the medians of 16 and of 5 losses ``before``."""
    finite = [loss for loss in before[-BEFORE:] if math.isfinite(loss)]
    if len(finite) < BEFORE // 2 or len(after) < AFTER:
        return False
    usual = min(statistics.median(finite), statistics.median(finite[-5:]))  # a falling loss is below its median
    return min(after) > usual + max(_NATS, _NOISES * noise_of(finite))


def loss_rise(losses: Mapping[int, float], alarms: Iterable[Alarm] = ()) -> int | None:
    """Return the first step at which a loss rose and stayed up, or was not finite; None if it never did.

    It has risen at once where the next 3 losses lie above those before (``risen``), and slowly where it stays for 20
    steps above its best by 0.5 nats and its noise, as the guard judges it.
    """
    steps, guard = sorted(losses), DivergenceGuard(margin=_SLOW, patience=_PATIENCE)
    values = [losses[step] for step in steps]
    for number, step in enumerate(steps):
        before, after = values[max(0, number - BEFORE) : number], values[number : number + AFTER]
        if not math.isfinite(values[number]) or risen(before, after):
            return step if guard.above_since is None else guard.above_since
        try:
            guard.see_loss(step, values[number])
        except Diverged:
            return guard.above_since
    return min((alarm.step for alarm in alarms if (alarm.rule, alarm.metric) == ("rise", LOSS)), default=None)


FINDINGS = Path(__file__).parent / "assets" / "findings.json"
"""The verdicts on the claims of ``CAUSES`` in sentences, written by docs/results.py from the records of studies."""
_SHOWN = 12  # alarms
_LOOK = "Look at that step's batch, learning rate and weights, and record more often (every=1)."
_ODDS = "Odds compare the causes that Lamina knows, as counted in small runs; elsewhere they are not calibrated."
RATE = "learning_rate"


def sentences(evidence: Evidence) -> list[str]:
    """Say what left first, at which layer and step, how early it was visible, its likely cause, and what to change."""
    first, rose = evidence.first, evidence.rose
    status = f"(status: {evidence.status})"
    if rose is None:
        texts = [f"The loss did not rise and stay up in {evidence.steps} steps {status}."]
    else:
        texts = [f"The loss rose at step {rose} of {evidence.steps} {status}."]
    if evidence.notable:
        steps = ", ".join(str(alarm.step) for alarm in evidence.notable[:_SHOWN])
        texts.append(f"Notable batches, whose gradient stood out and that nothing followed: at steps {steps}.")
    if first is None:
        texts.append("No layer left its usual range in the records.")
        if rose is not None:
            texts.append("Record more often (every=1) to see what happens between two records.")
        return texts
    told, place = [("What left first", first)], evidence.place or first
    if place != first and says_where(place):
        told.append(("What may say where", place))
    for what, alarm in told:
        name = evidence.names.get(alarm.layer)
        texts.append(f"{what}: {describe(alarm)}{f', {name}' if name else ''}.")
    if (lead := evidence.lead) is not None:
        early = f"It could have been seen {lead} step{'s' * (lead > 1)} before the loss rose."
        late = "The loss rose in the same step." if lead == 0 else "It showed only after the loss rose."
        texts.append(early if lead > 0 else late)
    then: dict[tuple[int, str, bool], str] = {}  # the first alarm of each other sub-layer, the telling ones first
    telling = {alarm: alarm.rule in ("not_finite", "written") for alarm in evidence.alarms}
    for alarm in sorted(evidence.alarms, key=lambda alarm: not telling[alarm]):
        where = (alarm.layer, alarm.sublayer)
        if alarm.step >= first.step and "block" not in where and (telling[alarm] or where != _place(first)):
            then.setdefault((*where, telling[alarm]), describe(alarm))
    then = {where: said for where, said in then.items() if said != describe(place)}
    then.pop((*_place(first), first.rule in ("not_finite", "written")), None)
    if then:
        texts.append(f"Then: {'; '.join([*then.values()][:3])}.")
    return texts + _causes(evidence)


def _place(alarm: Alarm) -> tuple[int, str]:
    return alarm.layer, alarm.sublayer


def _causes(evidence: Evidence) -> list[str]:
    """Name the likely causes with their odds, what to change, and how to check it."""
    texts: list[str] = []
    findings: dict[str, str] = read_json(FINDINGS)
    for number, (name, odds) in enumerate(causes_of(evidence)):
        if name == NOT_KNOWN:
            return ["The cause is not known: what left fits none of the failures that Lamina has seen. " + _LOOK]
        cause = CAUSES[name]
        texts.append(f"{'Or' if number else 'Likely cause'}: {name} (odds {min(odds, 0.99):.0%}). {cause.meaning}")
        texts += [f"To change: {change}." for change in open_changes(cause, evidence.settings)]
        texts.append(f"To check: {cause.check}.")
        texts += [f"Lamina's own study: {findings[claim]}" for claim in cause.claims if claim in findings]
    return [*texts, _ODDS] if texts else []
