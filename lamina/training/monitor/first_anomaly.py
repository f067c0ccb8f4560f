"""Find the alarm that explains a failure. A spike that passed does not explain a later failure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from lamina.training.monitor.alarms import (
    EVENT,
    FOLLOWS,
    Alarm,
    events,
    first_before,
    is_independent,
    is_spike,
    outlasts_spikes,
)
from lamina.training.monitor.loss_chart import noise_of
from lamina.training.monitor.rules import GRADIENTS

BEFORE, AFTER = 16, 3  # the number of earlier losses, and the number of later losses that are compared with them
NOISES = 6.0  # a loss is different if it differs by this many times the noise of the earlier losses
_TWICE = 2.0  # a gradient's spike has passed if the norm is at most this many times the norm before the spike
_HARD = ("not_finite", "dead", "written", "unmoved")  # an alarm of these rules is itself the failure


def first_anomaly(
    alarms: Iterable[Alarm], rose: float | None, losses: Mapping[int, float], norms: Mapping[int, float]
) -> Alarm | None:
    """Return the alarm that explains a failure best, or None if no alarm does.

    Lamina starts from the alarm that ``first_before`` returns. If this alarm is part of a spike that passed, Lamina
    takes the first alarm of the next event. An independent alarm within ``FOLLOWS`` steps takes precedence over an
    alarm about a risen gradient. Alarms of the rules in ``_HARD`` also take precedence.

    Args:
        alarms: the alarms, oldest first. Within a step, the alarm closest to the cause comes first.
        rose: the first step at which the loss rose and stayed high, or was not finite (None for no such step).
        losses: the training loss by step.
        norms: the norm of the whole model's gradient by step.
    """
    alarms = list(alarms)
    if (first := first_before(alarms, rose)) is None:
        return None
    lasting = _lasting(alarms, losses, norms)
    passed = None if rose is not None and rose > first.step + 3 * EVENT else first  # a spike explains no later rise
    if (first := next((group[0] for group in lasting if group[-1].step >= first.step), passed)) is None:
        return None
    if first.metric in GRADIENTS and first.rule == "rise":
        soon = range(first.step, first.step + FOLLOWS + 1)
        near = [alarm for alarm in alarms if alarm.step in soon]
        return next((alarm for alarm in near if alarm.rule in _HARD or is_independent(alarm)), first)
    return first


def _lasting(alarms: Iterable[Alarm], losses: Mapping[int, float], norms: Mapping[int, float]) -> list[list[Alarm]]:
    """Group alarms into events, and leave out spikes that passed."""
    steps = sorted(losses), sorted(norms)

    def passed(group: Sequence[Alarm], end: int) -> bool:
        """Return whether alarms show only a spike, after which loss and gradient fell back before the step ``end``."""
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
        # an alarm that no passed spike can explain begins a new event
        groups += (group[:at], group[at:]) if passed(group[:at], group[at].step) else (group,)
    ends = [*(group[0].step for group in groups[1:]), max(losses, default=0) + 1]
    return [group for group, end in zip(groups, ends, strict=True) if not passed(group, end)]


def _calm_steps(
    values: Mapping[int, float], steps: Sequence[int], begin: int, between: range, *, times: float = 1.0
) -> set[int]:
    """Return the steps in ``between`` at which the median of 3 values is back at the level before ``begin``."""
    at = bisect_left(steps, begin)
    before = [values[step] for step in steps[max(0, at - BEFORE) : at]]
    if len(before) < BEFORE // 2 or not all(map(math.isfinite, before)):
        return set()
    usual, noise = statistics.median(before), NOISES * noise_of(before) / math.sqrt(AFTER)
    later = steps[bisect_left(steps, between.start) : bisect_left(steps, between.stop)]
    threes = zip(later, later[1:], later[2:], strict=False)
    most = max(times * usual, usual + noise)
    return {three[-1] for three in threes if sorted([values[step] for step in three])[1] <= most}
