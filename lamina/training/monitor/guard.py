"""Stop a diverged run, and name the step and the layer of the first anomaly."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lamina.core.json_types import Json, RunState
from lamina.errors import OneLine
from lamina.jobs.status import Status
from lamina.training.monitor.alarms import Alarms, describe
from lamina.training.monitor.first_anomaly import first_anomaly
from lamina.training.monitor.loss_chart import noise_of
from lamina.training.monitor.writers import LOSS, NORM, Row
from lamina.training.setting_groups import GuardSettings

_NOISES, _CALM = 3.0, 64  # standard deviations of the noise, and the number of losses that determine the noise
_COURSE = 512  # losses and gradient norms that show whether a spike has passed


class Diverged(OneLine):
    """The error that ends training after a divergence. The file result.json records the reason.

    Args:
        since: the step at which the loss became too high (default: ``step``).
    """

    def __init__(self, step: int, reason: str, since: int | None = None):
        super().__init__(reason)
        self.step, self.reason, self.since = step, reason, step if since is None else since


@dataclass(kw_only=True)
class DivergenceGuard:
    """Watch losses and gradient norms, and stop a diverged run.

    A run has diverged if a loss or gradient is not finite, or if its loss stays too high for ``patience`` steps. The
    loss is too high if its median over the last ``patience`` / 4 steps exceeds the lowest median over ``patience``
    steps. The excess must be more than ``margin`` nats, and more than 3 standard deviations of the loss's noise.
    """

    margin: float
    patience: int
    alarms: Alarms = field(default_factory=Alarms)
    best: float = math.inf
    above_since: int | None = None  # the step at which the loss became too high, or None
    _recent: list[tuple[int, float]] = field(default_factory=list)  # steps and losses of the last ``patience`` steps
    _course: dict[str, dict[int, float]] = field(default_factory=lambda: {LOSS: {}, NORM: {}})  # the last, by step
    _calm: deque[float] = field(default_factory=lambda: deque(maxlen=_CALM))  # the last losses that were not too high

    def see_loss(self, step: int, loss: float, rows: Sequence[Row] = ()) -> None:
        """Check a step's loss. Raises Diverged. If the loss is not finite, first check ``rows`` for alarms."""
        if not math.isfinite(loss):
            self.alarms.see(rows)
            raise Diverged(step, f"the loss is {loss} at step {step}; {self.describe_first_anomaly()}")
        self._recent.append((step, loss))
        while self._recent[0][0] <= step - self.patience:
            del self._recent[0]
        soon = step - max(1, self.patience // 4)
        level = statistics.median([value for at, value in self._recent if at > soon])
        self.best = min(self.best, statistics.median_high([value for _, value in self._recent]))
        if level <= self.best + self.margin or level <= self.best + _NOISES * noise_of(list(self._calm)):
            self.above_since = None
            self._calm.append(loss)
            return
        self.above_since = step if self.above_since is None else self.above_since
        if step - self.above_since + 1 >= self.patience:
            raise Diverged(
                step,
                f"the loss was more than {self.margin:g} nats above its lowest level, {self.best:.3f}, from step "
                f"{self.above_since} to {step} (now {loss:.3f}); {self.describe_first_anomaly()}",
                since=self.above_since,
            )

    def accept(self) -> None:
        """Forget the losses so far, because the loss may stay high after a divergence that did not stop the run."""
        self.above_since, self.best, self._recent = None, math.inf, []

    def see_steps(self, rows: Iterable[Row]) -> None:
        """Store the loss and the gradient norm of each step since the last record."""
        for row in rows:
            self._course[row.metric][row.step] = row.value
        for values in self._course.values():
            for step in [*values][:-_COURSE]:
                del values[step]

    def see_gradient(self, step: int, norm: float, first: int | None = None, rows: Sequence[Row] = ()) -> None:
        """Check the total gradient norm before clipping. Raises Diverged if the norm is not finite."""
        if not math.isfinite(norm):
            self.alarms.see(rows)
            # ``first`` is the first step with such a norm
            at = f"step {step}" if first in (None, step) else f"step {first} (Lamina read the norm at step {step})"
            raise Diverged(step, f"the gradient norm is {norm} at {at}; {self.describe_first_anomaly()}")

    def state_dict(self) -> Json:
        seen = {"best": self.best, "above_since": self.above_since, "losses": [*self._recent], "calm": list(self._calm)}
        return {"guard": {**seen, "course": {metric: [*of.items()] for metric, of in self._course.items()}}}

    def load_state_dict(self, state: RunState) -> None:
        seen = state.get("guard", {})
        self.best, self.above_since = seen.get("best", math.inf), seen.get("above_since")
        self._recent = [(step, loss) for step, loss in seen.get("losses", [])]
        self._calm = deque(seen.get("calm", []), maxlen=_CALM)
        self._course = {LOSS: {}, NORM: {}} | {metric: dict(of) for metric, of in seen.get("course", {}).items()}

    def outcome(self, status: Status) -> Json:
        """Return the entries that the guard adds to result.json (none, except in subclasses)."""
        return {}

    def describe_first_anomaly(self) -> str:
        """Describe the first anomaly and its step."""
        rose = math.inf if self.above_since is None else self.above_since
        if (first := first_anomaly(self.alarms.so_far, rose, self._course[LOSS], self._course[NORM])) is None:
            return "no layer has an earlier anomaly"
        paths = {first.layer: f"model.model.layers[{first.layer}]"} if first.layer >= 0 else {}
        return f"the first anomaly is at {describe(first, paths | dict(self.alarms.paths))}"


MakeGuard: TypeAlias = Callable[[GuardSettings, float], DivergenceGuard]
"""A function that makes a divergence guard from the settings and the corpus's unigram entropy (in nats)."""


def usual_guard(settings: GuardSettings, unigram_entropy: float) -> DivergenceGuard:
    del unigram_entropy
    return DivergenceGuard(margin=settings.divergence_margin, patience=settings.divergence_patience)


@dataclass(kw_only=True)
class OutlierRule:
    """Decide whether a step's loss or gradient norm is an outlier, as OLMo-core's SkipStepOptimizer does.

    An outlier is not finite, or more than ``sigmas`` standard deviations above the mean of the last ``window`` steps.
    In the first ``window`` / 2 steps, no finite value is an outlier. Finite outliers also enter the window, so the rule
    adapts to a new level.
    """

    sigmas: float
    window: int = 128
    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def see(self, name: str, value: float) -> bool:
        """Add a step's value. Return whether the value is an outlier."""
        seen = self._seen.setdefault(name, deque(maxlen=self.window))
        if not math.isfinite(value):
            return True
        enough = len(seen) >= self.window // 2
        outlier = enough and value > statistics.fmean(seen) + self.sigmas * statistics.pstdev(seen)
        seen.append(value)
        return outlier


STILL_FALLING = 0.2  # nats by which the loss would fall in as many steps again at the pace of the last fifth
WINDOW = 0.2  # the final pace is the pace in this fraction of the run
NOTICED = 0.005  # nats: a smaller fall in the last fifth does not count
UNSLOWED = 0.25  # above the unigram entropy, a loss with this fraction of the run's mean pace is still falling
_SURE = 2.0  # standard errors: a smaller difference of mean training losses is noise

Point = tuple[float, float]  # step, loss


def still_falling(records: Iterable[Mapping[str, Any]], steps: int, entropy: float = math.inf) -> str | None:
    """If the loss is still falling at the end of a run, return the evidence as text, otherwise None.

    The loss is still falling if ``steps`` further steps at the final pace would lower the loss by STILL_FALLING nats. A
    loss above the unigram entropy is also still falling if the final pace is at least UNSLOWED times the mean pace. A
    run with a single recorded loss counts as still falling.

    Args:
        records: the lines of metrics.jsonl.
        steps: the run's number of steps. The extrapolation covers the same number of steps.
        entropy: the unigram entropy in nats. A loss often stays near this value for a while.
    """
    records = list(records)
    evaluated, trained = _points(records, "eval_loss"), _points(records, "loss")
    if len({step for step, _ in (*evaluated, *trained)}) < 2:
        return "only one loss was recorded"
    earlier = [point for point in evaluated if evaluated[-1][0] - point[0] >= WINDOW * steps]
    near = bool(earlier) and evaluated[-1][0] - earlier[-1][0] <= 2 * WINDOW * steps
    kind = "eval loss" if near else "training loss"
    pair = [earlier[-1], evaluated[-1]] if near else _means(trained, steps) or trained[-2:]
    if len(pair) < 2:
        return None
    (first, before), (last, after) = pair
    fallen, pace = before - after, (before - after) / (last - first)
    (start, highest), *_ = evaluated if kind == "eval loss" else trained
    unslowed = after > entropy and fallen >= NOTICED and pace * (last - start) >= UNSLOWED * (highest - after)
    if pace * steps < STILL_FALLING and not unslowed:
        return None
    return f"the {kind} still falls, from {before:.3f} at step {first:g} to {after:.3f} at step {last:g}"


def _means(points: list[Point], steps: int) -> list[Point]:
    """Return the mean step and loss of each of the last two fifths of the run. A difference within noise becomes 0."""
    last = [p for p in points if p[0] > (1 - WINDOW) * steps]
    before = [p for p in points if (1 - 2 * WINDOW) * steps < p[0] <= (1 - WINDOW) * steps]
    if not last or not before:
        return []
    mean = statistics.fmean
    means = [(mean(step for step, _ in part), mean(loss for _, loss in part)) for part in (before, last)]
    spreads = [statistics.variance(loss for _, loss in p) / len(p) if len(p) > 1 else 0.0 for p in (before, last)]
    noise = math.sqrt(sum(spreads))
    if means[0][1] - means[1][1] < _SURE * noise:
        return [(means[0][0], means[1][1]), means[1]]
    return means


def _points(records: list[Mapping[str, Any]], name: str) -> list[Point]:
    values = [(record.get("step"), record.get(name)) for record in records]
    return [(step, loss) for step, loss in values if isinstance(loss, int | float) and math.isfinite(loss) and step]
