"""Find the alarm that explains a failure. A spike that passed does not explain later alarms."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from lamina.training.monitor.alarms import (
    FOLLOWS,
    Alarm,
    events,
    first_before,
    is_independent,
    is_spike,
    outlasts_spikes,
)
from lamina.training.monitor.rules import GRADIENTS, noise_of

BEFORE, AFTER = 16, 3  # losses with which others are compared, and how many must lie above them
NOISES = 6.0  # a loss differs from others if it differs by so many times their noise
_TWICE = 2.0  # a gradient is back from a spike if its norm is at most so many times its norm before
_HARD = ("not_finite", "dead", "written", "unmoved")  # the alarms of these rules are the failure itself


def first_anomaly(
    alarms: Iterable[Alarm], rose: float | None, losses: Mapping[int, float], norms: Mapping[int, float]
) -> Alarm | None:
    """Return the alarm that explains a failure best, or None without alarms.

    Lamina starts from the alarm that ``first_before`` returns. If this alarm is part of a spike that passed, Lamina
    takes the first alarm of the next event. If a gradient rose first, Lamina prefers an alarm within ``FOLLOWS`` steps
    that is independent or has a rule in ``_HARD``.

    Args:
        alarms: the alarms, oldest first. Within a step, the alarm closest to the cause comes first.
        rose: the first step at which the loss rose and stayed up, or was not finite; None without such a step.
        losses: the training loss by step.
        norms: the norm of the whole model's gradient by step.
    """
    alarms = list(alarms)
    if (first := first_before(alarms, rose)) is None:
        return None
    lasting = _lasting(alarms, losses, norms)
    first = next((group[0] for group in lasting if group[-1].step >= first.step), first)
    if first.metric in GRADIENTS and first.rule == "rise":
        soon = range(first.step, first.step + FOLLOWS + 1)
        near = [alarm for alarm in alarms if alarm.step in soon]
        return next((alarm for alarm in near if alarm.rule in _HARD or is_independent(alarm)), first)
    return first


def _lasting(alarms: Iterable[Alarm], losses: Mapping[int, float], norms: Mapping[int, float]) -> list[list[Alarm]]:
    """Return the alarms grouped into events, without spikes that passed.

    An alarm that a passed spike cannot explain (``outlasts_spikes``) begins a new event.
    """
    steps = sorted(losses), sorted(norms)

    def passed(group: Sequence[Alarm], end: int) -> bool:
        """Return whether alarms belong to a spike, and the loss and the gradient came back down before ``end``."""
        if not group or not is_spike(group):
            return False
        begin, between = group[0].step, range(group[-1].step + 1, end)
        calm = _calm_steps(losses, steps[0], begin, between)
        if norms or any(alarm.metric in GRADIENTS for alarm in group):
            calm &= _calm_steps(norms, steps[1], begin, between, times=_TWICE)
        return bool(calm)

    groups: list[list[Alarm]] = []
    for group in events(alarms):
        at = next((number for number, alarm in enumerate(group) if outlasts_spikes(alarm)), 0)
        groups += (group[:at], group[at:]) if passed(group[:at], group[at].step) else (group,)
    ends = [*(group[0].step for group in groups[1:]), max(losses, default=0) + 1]
    return [group for group, end in zip(groups, ends, strict=True) if not passed(group, end)]


def _calm_steps(
    values: Mapping[int, float], steps: Sequence[int], begin: int, between: range, *, times: float = 1.0
) -> set[int]:
    """Return the steps in ``between`` at which a series has come back to its usual level.

    The usual level is the median of the 16 values before the step ``begin``. The median of 3 later values must be at
    most this level plus the noise, or at most this level times ``times``. With too few values, the result is empty.
    """
    at = bisect_left(steps, begin)
    before = [values[step] for step in steps[max(0, at - BEFORE) : at]]
    if len(before) < BEFORE // 2 or not all(map(math.isfinite, before)):
        return set()
    usual, noise = statistics.median(before), NOISES * noise_of(before) / math.sqrt(AFTER)
    later = steps[bisect_left(steps, between.start) : bisect_left(steps, between.stop)]
    threes = zip(later, later[1:], later[2:], strict=False)
    most = max(times * usual, usual + noise)
    return {three[-1] for three in threes if statistics.median(values[step] for step in three) <= most}
