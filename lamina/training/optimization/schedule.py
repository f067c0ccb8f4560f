"""The learning-rate schedules of Lamina's own settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lamina.training.setting_groups import in_steps
from lamina.training.settings import RunSettings


def schedule_of(settings: RunSettings) -> Callable[[int], float] | None:
    """The share of the peak rate by steps done, for ``wsd``; None for ``cosine``, which is Trainer's own."""
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


def planned_shares(settings: RunSettings) -> Callable[[int], float]:
    """The share of the peak rate by steps done, for Trainer's schedule and for Lamina's own."""
    schedule = schedule_of(settings)
    if schedule is not None:
        return schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    warmup = in_steps(settings.warmup, settings.steps)
    return get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, settings.steps, min_lr_rate=settings.min_learning_rate
    ).lr_lambdas[0]


def with_shorter_warmup(shares: Callable[[int], float], done: int, *, warmup: int, planned_warmup: int) -> float:
    """The share of the peak rate after ``done`` steps of a schedule with a warm-up shorter than planned."""
    return done / warmup if done < warmup else shares(done - warmup + planned_warmup)


def warmup_stable_decay(done: int, *, warmup: int, decay: int, steps: int, low: float, shape: str) -> float:
    """The share of the peak rate after ``done`` steps: up from 0, constant, down to ``low`` over the last ``decay``.

    With u, the completed share of the decay, the rate falls as 1 - u (linear), 1 - sqrt(u) (1-sqrt) or
    (1 + cos(pi u)) / 2 (cosine), scaled to end at ``low``. MiniCPM (arXiv 2404.06395) named the schedule; 1-sqrt is
    Hägele et al.'s (arXiv 2405.18392).
    """
    if done < warmup:
        return done / warmup
    over = min(1.0, max(0.0, (done - (steps - decay)) / max(1, decay)))
    share = {
        "linear": 1.0 - over,
        "1-sqrt": 1.0 - math.sqrt(over),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * over)),
    }
    return low + (1.0 - low) * share[shape]
