"""The learning rate's schedules that are settings of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from lamina.training.setting_groups import in_steps
from lamina.training.settings import RunSettings


def schedule_of(settings: RunSettings) -> Callable[[int], float] | None:
    """The share of the peak rate by steps done, for ``wsd``; None for ``cosine``, which is the Trainer's own."""
    if settings.schedule == "cosine":
        return None
    return partial(
        warmup_stable_decay,
        warmup=in_steps(settings.warmup, settings.steps),
        decay=in_steps(settings.decay, settings.steps),
        steps=settings.steps,
        low=settings.min_learning_rate,
        shape=settings.decay_shape,
    )


def warmup_stable_decay(done: int, *, warmup: int, decay: int, steps: int, low: float, shape: str) -> float:
    """The share of the peak rate after ``done`` steps: up from 0, level, and down to ``low`` over the last ``decay``.

    With u, the share of the decay that is over, the rate falls as 1 - u (linear), 1 - sqrt(u) (1-sqrt) or
    (1 + cos(pi u)) / 2 (cosine), scaled to end at ``low``. MiniCPM (arXiv 2404.06395) named the schedule; 1-sqrt is
    Hägele et al.'s (arXiv 2405.18392).
    """
    if done < warmup:
        return done / warmup
    over = min(1.0, max(0.0, (done - (steps - decay)) / max(1, decay)))
    left = {"linear": 1.0 - over, "1-sqrt": 1.0 - math.sqrt(over), "cosine": 0.5 * (1.0 + math.cos(math.pi * over))}
    return low + (1.0 - low) * left[shape]
