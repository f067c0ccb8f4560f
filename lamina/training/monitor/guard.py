"""The divergence guard, which names the step and the layer that left first, and the rule that skips outlier steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lamina.core.json_types import Json
from lamina.jobs.status import Status
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.monitor.writers import Row
from lamina.training.setting_groups import GuardSettings

Key = tuple[int, str, str]  # layer, sub-layer, metric
WATCHED = ("gradient_norm", "hidden_variance", "hidden_abs_max")


class Diverged(Exception):
    """Ends the training loop; ``reason`` is for result.json."""

    def __init__(self, step: int, reason: str):
        super().__init__(reason)
        self.step, self.reason = step, reason


@dataclass(kw_only=True)
class DivergenceGuard:
    """Watches losses and layer statistics.

    A run has diverged when a loss or gradient is not finite, or when the loss stays more than ``margin`` nats above
    its best for ``patience`` steps. A layer has left when one of its watched statistics is not finite or exceeds
    ``factor`` times its median over the last ``window`` records; it is back when the statistic is in range again.
    """

    margin: float
    patience: int
    factor: float = 10.0
    window: int = 20
    best: float = math.inf
    above_since: int | None = None
    recent: dict[Key, deque[float]] = field(default_factory=dict)
    departed: dict[Key, tuple[int, float]] = field(default_factory=dict)
    paths: Mapping[int, str] = field(default_factory=dict)  # of the layers of a model that isn't Lamina's

    def see_layers(self, rows: Iterable[Row]) -> None:
        """Read the monitor's rows of one step and note the layers that left at it, or came back."""
        for step, layer, sublayer, _, _, metric, value in rows:
            if metric not in WATCHED or layer < 0 or sublayer == "block":
                continue
            key = (layer, sublayer, metric)
            recent = self.recent.setdefault(key, deque(maxlen=self.window))
            usual = statistics.median(recent) if len(recent) >= 3 else math.inf
            ratio = value / usual if math.isfinite(value) and usual > 0 else 0.0
            if not math.isfinite(value):
                self.departed[key] = (step, math.inf)
            elif ratio > self.factor:
                self.departed[key] = (self.departed.get(key, (step, 0.0))[0], ratio)
            else:
                self.departed.pop(key, None)
            if math.isfinite(value):
                recent.append(value)

    def see_loss(self, step: int, loss: float) -> None:
        """Check a step's loss. Raises Diverged."""
        if not math.isfinite(loss):
            raise Diverged(step, f"the loss is {loss} at step {step}; {self.first_to_leave()}")
        self.best = min(self.best, loss)
        if loss <= self.best + self.margin:
            self.above_since = None
            return
        self.above_since = step if self.above_since is None else self.above_since
        if step - self.above_since + 1 >= self.patience:
            raise Diverged(
                step,
                f"the loss stayed more than {self.margin:g} nats above its best of {self.best:.3f} from step "
                f"{self.above_since} to {step} (now {loss:.3f}); {self.first_to_leave()}",
            )

    def see_steps(self, rows: Iterable[Row]) -> None:
        """Read the loss and the gradient norm of every step since the last record; here only ``see_loss`` decides."""

    def see_gradient(self, step: int, norm: float, rows: Sequence[Row]) -> None:
        """Check the total gradient norm before clipping and, if it isn't finite, its layers. Raises Diverged."""
        if math.isfinite(norm):
            return
        self.see_layers(rows)
        raise Diverged(step, f"the gradient's norm is {norm} at step {step}; {self.first_to_leave()}")

    def state_dict(self) -> Json:
        """Its observations so far, for a checkpoint."""
        seen = {
            "best": self.best,
            "above_since": self.above_since,
            "recent": [[*key, list(values)] for key, values in self.recent.items()],
            "left": [[*key, *where] for key, where in self.departed.items()],
        }
        return {"guard": seen}

    def load_state_dict(self, state: RunState) -> None:
        """Resume with the observations of a checkpoint."""
        if (seen := state.get("guard")) is None:
            return
        self.best, self.above_since = seen["best"], seen["above_since"]
        self.recent = {(a, b, c): deque(values, maxlen=self.window) for a, b, c, values in seen["recent"]}
        self.departed = {(a, b, c): (step, ratio) for a, b, c, step, ratio in seen["left"]}

    def outcome(self, status: Status) -> Json:
        """Return the guard's columns of result.json for a run that ended with ``status``: none here."""
        return {}

    def first_to_leave(self) -> str:
        """Name the layer that left first, and when, in a clause; values that are not finite come first."""
        if not self.departed:
            return "no layer's recorded statistics left before it"
        broken = {key: where for key, where in self.departed.items() if math.isinf(where[1])} or self.departed
        first = min(step for step, _ in broken.values())
        key = max(
            (key for key, where in broken.items() if where[0] == first), key=lambda key: _blame(key, broken[key][1])
        )
        layer, sublayer, metric = key
        ratio = broken[key][1]
        excess = f"{ratio:.0f} times its recent median" if math.isfinite(ratio) else "not finite"
        name = self.paths.get(layer, f"model.model.layers[{layer}]")
        where = f"{name}, block {layer + 1} ({sublayer})"
        return f"{where}, left first: its {metric} was {excess} at step {first}"


MakeGuard: TypeAlias = Callable[[GuardSettings, float], DivergenceGuard]
"""Makes a run's guard from its settings and its corpus's unigram entropy, in nats."""


def usual_guard(settings: GuardSettings, unigram_entropy: float) -> DivergenceGuard:
    """The guard of a run that is meant to reach its last step."""
    del unigram_entropy
    return DivergenceGuard(margin=settings.divergence_margin, patience=settings.divergence_patience)


def _blame(key: Key, ratio: float) -> tuple[float, int, int]:
    """Rank layers by excess; for values that are not finite, by origin: states spread to later layers, gradients to
    earlier.
    """
    layer, sublayer, metric = key
    order = 2 * layer + (sublayer == "feed_forward")
    return (ratio, 0, order) if metric == "gradient_norm" else (ratio, 1, -order)


@dataclass(kw_only=True)
class OutlierRule:
    """Whether a step's loss or gradient norm is an outlier, as in OLMo-core's SkipStepOptimizer.

    It is one if it is not finite, or more than ``sigmas`` standard deviations above the mean of the last ``window``
    steps' values, of at least half a window. A skipped step's values enter the window, as in OLMo-core, so that a new
    level is accepted after a while.
    """

    sigmas: float
    window: int = 128
    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def see(self, name: str, value: float) -> bool:
        """Note a value of this step; returns whether it is an outlier."""
        seen = self._seen.setdefault(name, deque(maxlen=self.window))
        if not math.isfinite(value):
            return True
        known = len(seen) >= self.window // 2
        outlier = known and value > statistics.fmean(seen) + self.sigmas * statistics.pstdev(seen)
        seen.append(value)
        return outlier


STILL_FALLING = 0.2  # nats by which as many steps again would lower the loss, at the pace of the last fifth
WINDOW = 0.2  # share of the run over which a pace is measured
NOTICED = 0.005  # nats: a smaller fall in the last fifth does not count
UNSLOWED = 0.25  # share of the run's mean pace: a run above the unigram entropy that keeps it is still falling
_SURE = 2.0  # standard errors: a smaller difference of mean training losses is noise

Point = tuple[float, float]  # step, loss


def still_falling(records: Iterable[Mapping[str, Any]], steps: int, entropy: float = math.inf) -> str | None:
    """Return a clause with two losses if the loss still falls at the end of ``steps`` steps; None otherwise.

    It still falls if, at the pace of the end, as many steps again would lower it by STILL_FALLING nats; or, for a loss
    above ``entropy`` (the plateau on which runs get stuck), if that pace is at least UNSLOWED of the whole run's.

    ``records`` are the lines of metrics.jsonl. The pace of the end is that of the eval loss over the last fifth of the
    run (up to two fifths if none was measured in between); without such evaluations, that of the training loss,
    averaged over the last fifth and the one before. A run with a single recorded loss counts as still falling.
    """
    records = list(records)
    evaluated, trained = _points(records, "eval_loss"), _points(records, "loss")
    if len({step for step, _ in (*evaluated, *trained)}) < 2:
        return "only one loss was recorded"
    pair = _evaluations(evaluated, steps)
    kind = "eval loss" if pair else "training loss"
    pair = pair or _means(trained, steps) or trained[-2:]
    if len(pair) < 2:
        return None
    (first, before), (last, after) = pair
    fallen, pace = before - after, (before - after) / (last - first)
    (start, highest), *_ = evaluated if kind == "eval loss" else trained
    unslowed = after > entropy and fallen >= NOTICED and pace * (last - start) >= UNSLOWED * (highest - after)
    if pace * steps < STILL_FALLING and not unslowed:
        return None
    return f"the {kind} still falls, from {before:.3f} at step {first:g} to {after:.3f} at step {last:g}"


def _evaluations(points: list[Point], steps: int) -> list[Point]:
    """Return the last evaluation, and the latest one that is a fifth to two fifths of the run earlier."""
    for step, loss in reversed(points[:-1]):
        if WINDOW * steps <= points[-1][0] - step:
            return [(step, loss), points[-1]] if points[-1][0] - step <= 2 * WINDOW * steps else []
    return []


def _means(points: list[Point], steps: int) -> list[Point]:
    """The mean losses of the last two fifths of the run; a difference within their noise counts as 0."""
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
