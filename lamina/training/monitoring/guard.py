"""The divergence guard: decides that a run is over, and names the step and the layer that left first."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina.training.checkpointing.stateful import RunState
from lamina.training.monitoring.layers import Row

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

    A run has diverged on a loss or gradient that is not finite, or when the loss stays more than ``margin`` nats above
    its best for ``patience`` steps. A layer has left when a watched statistic of it is not finite or exceeds ``factor``
    times its median over the last ``window`` records; it is back when the statistic is in range again.
    """

    margin: float
    patience: int
    factor: float = 10.0
    window: int = 20
    best: float = math.inf
    above_since: int | None = None
    recent: dict[Key, deque[float]] = field(default_factory=dict)
    left: dict[Key, tuple[int, float]] = field(default_factory=dict)

    def see_layers(self, rows: Iterable[Row]) -> None:
        """Take the monitor's rows of one step and note the layers that left at it, or came back."""
        for step, layer, sublayer, _, _, metric, value in rows:
            if metric not in WATCHED or layer < 0 or sublayer == "block":
                continue
            key = (layer, sublayer, metric)
            recent = self.recent.setdefault(key, deque(maxlen=self.window))
            usual = statistics.median(recent) if len(recent) >= 3 else math.inf
            ratio = value / usual if math.isfinite(value) and usual > 0 else 0.0
            if not math.isfinite(value):
                self.left[key] = (step, math.inf)
            elif ratio > self.factor:
                self.left[key] = (self.left.get(key, (step, 0.0))[0], ratio)
            else:
                self.left.pop(key, None)
            if math.isfinite(value):
                recent.append(value)

    def see_loss(self, step: int, loss: float) -> None:
        """Take a step's loss. Raises Diverged."""
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

    def see_gradient(self, step: int, norm: float, rows: Sequence[Row]) -> None:
        """Take the total gradient norm before clipping and, where it isn't finite, its layers. Raises Diverged."""
        if math.isfinite(norm):
            return
        self.see_layers(rows)
        raise Diverged(step, f"the gradient's norm is {norm} at step {step}; {self.first_to_leave()}")

    def state_dict(self) -> dict[str, Any]:
        """What it has seen, for a checkpoint."""
        seen = {
            "best": self.best,
            "above_since": self.above_since,
            "recent": [[*key, list(values)] for key, values in self.recent.items()],
            "left": [[*key, *where] for key, where in self.left.items()],
        }
        return {"guard": seen}

    def load_state_dict(self, state: RunState) -> None:
        """Resume with what it had seen at a checkpoint."""
        if (seen := state.get("guard")) is None:
            return
        self.best, self.above_since = seen["best"], seen["above_since"]
        self.recent = {(a, b, c): deque(values, maxlen=self.window) for a, b, c, values in seen["recent"]}
        self.left = {(a, b, c): (step, ratio) for a, b, c, step, ratio in seen["left"]}

    def first_to_leave(self) -> str:
        """A clause that names the layer whose statistics left first, and when: those not finite before all others."""
        if not self.left:
            return "no layer's recorded statistics left before it"
        broken = {key: where for key, where in self.left.items() if math.isinf(where[1])} or self.left
        first = min(step for step, _ in broken.values())
        key = max(
            (key for key, where in broken.items() if where[0] == first), key=lambda key: _blame(key, broken[key][1])
        )
        layer, sublayer, metric = key
        ratio = broken[key][1]
        how = f"{ratio:.0f} times its recent median" if math.isfinite(ratio) else "not finite"
        where = f"model.model.layers[{layer}], block {layer + 1} ({sublayer})"
        return f"{where}, left first: its {metric} was {how} at step {first}"


def _blame(key: Key, ratio: float) -> tuple[float, int, int]:
    """The largest excess; of those not finite, where it arose: states spread upwards, gradients downwards."""
    layer, sublayer, metric = key
    order = 2 * layer + (sublayer == "feed_forward")
    return (ratio, 0, order) if metric == "gradient_norm" else (ratio, 1, -order)
