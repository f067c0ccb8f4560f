"""What a run's records show: the alarms by step, where the loss rose, and weights that jumped between two records."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_result, read_yaml
from lamina.jobs.names import ALARMS, CONFIG
from lamina.reports.records import Frame, Trial, read_run
from lamina.training.monitor.alarms import FACTORS, Alarm, read_alarms
from lamina.training.monitor.watched import check_version, read_about

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

    @property
    def times(self) -> float:
        """How many times larger or smaller; infinite for weights that came from zero, or went to it."""
        low, high = sorted((self.before, self.after))
        return high / low if low > 0 else float("inf")


def jump_around(rows: Frame, step: int) -> Jump | None:
    """The largest jump between the records before ``step`` and at it or behind it; None if there is none."""
    inside = rows[(rows["layer"] >= 0) & (rows["sublayer"] != "block") & (rows["role"] == "all")]
    return max(_jumps(inside, step), key=lambda jump: jump.times, default=None)


def _jumps(rows: Frame, step: int) -> Iterator[Jump]:
    """Those of all sub-layers. A record's weights are those before its update."""
    tables = {metric: rows[rows["metric"] == metric] for metric in ("weight_norm", "update_norm")}
    moved = {place: group.groupby("step")["value"].last() for place, group in _by_place(tables["update_norm"])}
    for (layer, sublayer), group in _by_place(tables["weight_norm"]):
        norms = group.groupby("step")["value"].last()
        for start, end in pairwise(sorted(norms.index)):
            if not start < step <= end:
                continue
            before, after = float(norms[start]), float(norms[end])
            updates = moved.get((layer, sublayer))
            largest = 0.0 if updates is None else max(float(updates.get(at, 0.0)) for at in (start, end))
            change = abs(after - before)
            if change > _TIMES * (end - start) * largest and change > _SHARE * before:
                yield Jump(
                    start=int(start),
                    end=int(end),
                    layer=int(layer),
                    sublayer=str(sublayer),
                    before=before,
                    after=after,
                )


def _by_place(rows: Frame) -> Iterator[tuple[tuple[int, str], Frame]]:
    yield from rows.groupby(["layer", "sublayer"])


_BEFORE, _AFTER = 16, 3  # steps that a loss is compared with, and over which it must stay up
_NATS, _DEVIATIONS = 0.15, 6.0
_LASTS = 8  # steps for which a series must stay up to be more than a batch
_ORDER = ("not_finite", "dead", "apart", "fp16", "rewritten", "logit", "rise")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run's records show.

    Attributes:
        trial: the run's records.
        alarms: oldest first; of one step the one that explains most first.
        rose: the first step at which the loss had risen; None if it never did.
        status, reason: from result.json.
        steps: the last recorded step.
        names: the layers' paths in the model.
        half: whether the model computes in float16.
        settings: of the run, as its config.yaml says them, and what was seen of a watched training's.
    """

    trial: Trial
    alarms: tuple[Alarm, ...]
    rose: int | None
    status: str
    reason: str
    steps: int
    names: Mapping[int, str]
    half: bool = False
    settings: Json = field(default_factory=dict)

    @property
    def first(self) -> Alarm | None:
        """The first alarm, where it has to do with the loss: before it rose, or at all if it did not."""
        if not self.alarms:
            return None
        if self.rose is None:
            return self.alarms[0]
        # an alarm long before that was followed by calm steps belongs to something else
        near = [a for a in self.alarms if a.step <= self.rose and (self.rose - a.step <= 200 or a.rule != "rise")]
        return near[0] if near else self.alarms[0]

    @property
    def first_weights(self) -> int:
        """The first step at which weights were recorded; 0 if they never were."""
        rows = self.trial.layers
        steps = rows[rows["metric"] == "weight_norm"]["step"]
        return 0 if steps.empty else int(steps.min())

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
        """How many steps before the loss rose the first alarm was."""
        return None if self.rose is None or self.first is None else self.rose - self.first.step


def gather(folder: Path) -> Evidence:
    """Read a run's folder. Raises UserError if it has no records by layer, or records of another version."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"run: {str(folder)!r} is no folder (allowed: a run of Lamina's, or one that was watched)")
    check_version(folder)
    trial = read_run(folder).trials[0]
    rows = trial.layers
    if rows.empty:
        raise UserError(
            f"run: {str(folder)!r} has no records by layer (allowed: the folder of lamina pretrain, sft, ..., of "
            "lamina.LayerMonitor or of lamina.watch)"
        )
    result, about = read_result(folder) or {}, read_about(folder)
    alarms = _readable(read_alarms(folder))
    settings = _settings_of(folder)
    names = {index: str(layer.get("path", "")) for index, layer in enumerate(about.get("layers", ()))}
    return Evidence(
        trial=trial,
        alarms=tuple(sorted(alarms, key=lambda a: (a.step, _ORDER.index(a.rule), -a.excess))),
        rose=loss_rise(losses_of(trial)),
        status=str(result.get("status") or "unfinished"),
        reason=str(result.get("reason") or ""),
        steps=int(rows["step"].max()),
        names=names,
        half=bool(about.get("half")) or settings.get("precision") == "fp16",
        settings={**(seen if isinstance(seen := about.get("settings"), dict) else {}), **settings},
    )


def _readable(lines: Sequence[Json]) -> list[Alarm]:
    """The alarms whose rule this version has; another version's, or damaged ones, are left out with one warning."""
    names = {each.name for each in fields(Alarm)}
    known = [line for line in lines if line.get("rule") in _ORDER and line.keys() == names]
    if others := [str(line.get("rule")) for line in lines if line not in known]:
        words = ", ".join(repr(rule) for rule in sorted(set(others)))
        logger.warning("%s: alarms left out that this version does not know: %d (%s)", ALARMS, len(others), words)
    return [Alarm(**line) for line in known]


def _settings_of(folder: Path) -> Json:
    try:
        return read_yaml(folder / CONFIG)
    except UserError:
        return {}


def losses_of(trial: Trial) -> dict[int, float]:
    """The training loss by step: of every step where it was recorded, else of the logged ones."""
    rows = trial.layers
    series = rows[rows["metric"] == "step_loss"].groupby("step")["value"].last()
    if series.empty:
        logged = trial.metrics
        series = logged[logged["loss"].notna()].groupby("step")["loss"].last()
    return {int(step): float(value) for step, value in series.items()}


def loss_rise(losses: Mapping[int, float]) -> int | None:
    """The first step at which a loss rose and stayed up, or was not finite; None for one that did not.

    It has risen where the lowest of the next 3 losses lies above the losses before (the lower of the medians of 16 and
    of 5) by 0.15 nats and by 6 robust deviations of their noise.
    """
    steps = sorted(losses)
    values = [losses[step] for step in steps]
    for place, step in enumerate(steps):
        if not math.isfinite(values[place]):
            return step
        before, after = values[max(0, place - _BEFORE) : place], values[place : place + _AFTER]
        if len(before) >= _BEFORE // 2 and min(after) > _limit(before):
            return step
    return None


def _limit(before: Sequence[float]) -> float:
    finite = [value for value in before if math.isfinite(value)]
    if not finite:
        return math.inf
    usual = min(statistics.median(finite), statistics.median(finite[-5:]))  # a falling loss is below its median
    moved = [abs(later - earlier) for earlier, later in pairwise(finite)] or [0.0]
    spread = 1.4826 * statistics.median(moved) / math.sqrt(2)  # of the noise, whatever the trend
    return usual + max(_NATS, _DEVIATIONS * spread)
