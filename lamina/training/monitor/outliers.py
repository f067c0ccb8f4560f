"""Skipping the step of an outlier: its gradients are dropped, so weights and moments stay as they were."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

LOSS, GRADIENT = "loss", "gradient norm"


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
