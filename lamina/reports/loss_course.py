"""Find the steps at which the loss rose and stayed high, spiked, or came back down."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite

import numpy as np

from lamina.training.monitor.alarms import Alarm
from lamina.training.monitor.first_anomaly import AFTER, BEFORE, NOISES
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.loss_chart import LAG, noise_of
from lamina.training.monitor.writers import LOSS

_EARLY = 1.5  # times the first losses
_SLOW, _PATIENCE = 0.5, 20  # nats above its best, and steps for which a loss that has risen slowly stays there
_ABOVE = 1.5  # noises above the usual level, from which on a loss belongs to a rise
_MOST_RISES = 20
_CALM = 5  # losses that are compared with those before a rise
_NATS = 0.15  # least difference of losses that have risen
_WANDERS = 3.0  # times the spread of losses that are far apart
_RESTARTED = 1.0  # nats by which a loss may rise where the learning rate starts anew
_HUGE, _SMALL = 1e3, 1e-2  # times the first losses (at least ``_SMALL``), above which a single loss is a spike
_LEVEL, _TIMES = 1e-4, 3.0  # a loss near 0 that is a level, and how many times as high it has risen


def risen(before: Sequence[float], after: Sequence[float], *, wanders: float = 0.0) -> bool:
    """Return whether all losses ``after`` exceed the level of the losses ``before`` by at least ``wanders``."""
    if len(after) < AFTER or min(after) <= min(filter(isfinite, before[-BEFORE:]), default=math.inf) + _NATS:
        return False  # at once, as of most losses
    return min(after) > _ceiling(before, _NATS, wanders)


def _ceiling(before: Sequence[float], least: float, wanders: float) -> float:
    """Return the loss above which a loss has risen, or infinity if there are too few losses ``before``."""
    finite = [loss for loss in before[-BEFORE:] if isfinite(loss)]
    if len(finite) < BEFORE // 2:
        return math.inf
    usual = min(statistics.median(finite), statistics.median(finite[-5:]))  # a falling loss is below its median
    return usual + max(least, NOISES * noise_of(finite), wanders)


def spikes_of(losses: Mapping[int, float]) -> dict[int, tuple[float, int | None]]:
    """Find the spikes of the loss. A spike is a rise of the loss by at least half a nat.

    The result maps the first step of a spike to the highest loss in the spike, and to the step at which the loss was
    low again (None if the record ends first).
    """
    spikes, usual, begin = dict[int, tuple[float, int | None]](), list[float](), None
    steps = sorted(losses)
    for number, step in enumerate(steps):
        loss = losses[step]
        if (
            usual and len(usual) < BEFORE // 2
        ):  # too few to know their noise: only a large rise of several losses, or a huge loss, counts
            least = _EARLY * max(usual) + _SLOW
            after = [losses[later] for later in steps[number : number + AFTER]]
            huge = loss > _HUGE * max(*usual, _SMALL)
            if begin is None and (huge or (len(after) == AFTER and min(after) > least > _SLOW)):
                begin = step
            if begin is not None and loss > max(usual) + _SLOW:
                spikes[begin] = max(loss, spikes.get(begin, (loss, None))[0]), None
                continue
        if loss > min(usual[-BEFORE:], default=math.inf) + _SLOW:
            if begin is None and loss > _ceiling(usual, _SLOW, wander_of(usual)):
                begin, spikes[step] = step, (loss, None)
                continue
            if begin is not None and loss > _ceiling(usual, _SLOW, 0.0):
                spikes[begin] = max(loss, spikes[begin][0]), None
                continue
        if begin is not None:
            spikes[begin], begin = (spikes[begin][0], step), None
        usual.append(loss)
    return spikes


def rise_begins(losses: Mapping[int, float], rose: int, *, summed: bool) -> int:
    """Return the first step of the rise that has begun by the step ``rose``."""
    steps = sorted(losses)
    at = bisect_left(steps, rose)
    before = [
        loss for step in steps[max(0, at - LAG - 2 * BEFORE) : max(0, at - LAG)] if isfinite(loss := losses[step])
    ]
    if len(before) < BEFORE // 2:
        return rose
    # ``summed``: an alarm found the rise by adding up losses
    ceiling = statistics.median(before[-BEFORE:]) + max(_NATS, (_ABOVE if summed else 2 * _ABOVE) * noise_of(before))
    while at > 0 and losses[steps[at - 1]] > ceiling:
        at -= 1
    return steps[at]


def rises_of(
    losses: Mapping[int, float], alarms: Sequence[Alarm] = (), rates: Mapping[int, float] | None = None
) -> tuple[int | None, tuple[int, ...]]:
    """Return the step of the main rise of the loss, and the steps of other rises, which came back down."""
    found, begin, back = list[int](), min(losses, default=0), None
    while len(found) < _MOST_RISES:
        rest = {step: loss for step, loss in losses.items() if step >= begin}
        later = [alarm for alarm in alarms if alarm.step >= begin]
        if (rose := loss_rise(rest, later, rates and {at: rates[at] for at in rates if at >= begin})) is None:
            break
        found.append(rose)
        if (back := back_at(losses, rose, stays=False)) is None:
            break
        begin = back
    if not found:
        return None, ()
    # if no rise stays, the main rise is the last rise before the first alarm
    before = [rose for rose in found if alarms and rose <= alarms[0].step]
    chosen = found.pop(max(0, len(before) - 1) if back is not None else -1)
    return chosen, tuple(found)


def back_at(losses: Mapping[int, float], rose: int, *, stays: bool = True) -> int | None:
    """Return the first step at which the loss is back at the level before the rise, or None."""
    steps = sorted(losses)
    at = bisect_left(steps, rose)
    values = [losses[step] for step in steps]
    before = [loss for loss in values[:at][-2 * BEFORE :] if isfinite(loss)]
    if len(before) < BEFORE // 2:
        return None
    usual = min(statistics.median(before[-BEFORE:]), statistics.median(before[-_CALM:]))
    low = usual + max(_NATS, noise_of(before))
    # with ``stays``, the last losses must be at this level, too
    if stays and not (all(map(isfinite, values[-_CALM:])) and statistics.median(values[-_CALM:]) <= low):
        return None
    after = (number for number in range(at + 1, len(values) - _CALM + 1) if values[number] <= low)
    return next((steps[number] for number in after if statistics.median(values[number : number + _CALM]) <= low), None)


def wander_of(losses: Sequence[float]) -> float:
    """Return how far the loss usually drifts from the trend within 16 records, or 0 if noise explains the drift."""
    finite = [loss for loss in losses[-4 * BEFORE :] if isfinite(loss)]
    if len(finite) < 2 * BEFORE:
        return 0.0
    moved = [later - earlier for earlier, later in zip(finite, finite[BEFORE:], strict=False)]
    middle = statistics.median(moved)
    spread = 1.4826 * statistics.median(abs(each - middle) for each in moved) / math.sqrt(2)
    return _WANDERS * spread if spread > 1.5 * noise_of(finite) else 0.0


def step_in(losses: Sequence[float]) -> tuple[float, float, float]:
    """Fit a line with a jump in the middle. Return the slope per loss, the jump, and the standard error of the jump."""
    count = len(losses)
    number = np.arange(count)
    columns = np.stack([np.ones(count), number, number >= count // 2], axis=1)
    fitted, *_ = np.linalg.lstsq(columns, np.asarray(losses), rcond=None)
    variance = float(np.square(losses - columns @ fitted).sum()) / (count - 3)
    error = math.sqrt(variance * float(np.linalg.inv(columns.T @ columns)[2, 2]))
    return float(fitted[1]), float(fitted[2]), error


def restarts(rates: Mapping[int, float]) -> list[int]:
    """Return the steps at which the learning rate goes back up, as in cosine schedules with restarts."""
    steps, jumps, highest = sorted(rates), [], 0.0
    for before, step in pairwise(steps):
        highest = max(highest, rates[before])
        if 1.5 * rates[before] < rates[step] <= 1.1 * highest and 2.0 * rates[before] < highest:
            jumps.append(step)
    return jumps


def loss_rise(
    losses: Mapping[int, float], alarms: Iterable[Alarm] = (), rates: Mapping[int, float] | None = None
) -> int | None:
    """Return the first step at which the loss rose and stayed high, or was not finite. If there is none, return None.

    After a sudden rise, the next 3 losses are above the earlier losses (``risen``). A rise is slow
    if 20 losses exceed the lowest loss by 0.5 nats plus the noise (``DivergenceGuard``). Lamina counts losses,
    not steps.

    ``rates`` are the learning rates in another tool's record. With ``rates``, the usual drift of the loss does not
    count as a rise. When the learning rate restarts, the loss may also rise by up to 1 nat.
    """
    steps = sorted(losses)
    if rates is None:
        rose = _rise_in(losses, steps)
        told = [alarm.step for alarm in alarms if (alarm.rule, alarm.metric) == ("rise", LOSS)]
        return min(told, default=None) if rose is None else rose
    cuts = [0, *(bisect_left(steps, step) for step in restarts(rates)), len(steps)]
    for first, last in pairwise(cuts):
        before, after = (
            [losses[step] for step in part if isfinite(losses[step])]
            for part in (steps[max(0, first - BEFORE) : first], steps[first : min(last, first + 2 * BEFORE)])
        )
        if first and len(before) > AFTER and len(after) > AFTER and min(after) > statistics.median(before) + _RESTARTED:
            return steps[first]
        if (rose := _rise_in(losses, steps[first:last], may_wander=True)) is not None:
            return rose
        if (rose := _rise_near_zero([losses[step] for step in steps[first:last]])) is not None:
            return steps[first + rose]
    told = [alarm.step for alarm in alarms if (alarm.rule, alarm.metric) == ("rise", LOSS)]
    return min(told, default=None)


def _rise_in(losses: Mapping[int, float], steps: Sequence[int], *, may_wander: bool = False) -> int | None:
    guard = DivergenceGuard(margin=_SLOW, patience=_PATIENCE)
    values = [losses[step] for step in steps]
    for number, step in enumerate(steps):
        before, after = values[max(0, number - BEFORE) : number], values[number : number + AFTER]
        high = isfinite(values[number]) and risen(before, after)
        if high and may_wander:
            high = risen(before, after, wanders=wander_of(values[max(0, number - 4 * BEFORE) : number]))
        if high or not isfinite(values[number]):
            return step if guard.above_since is None else steps[guard.above_since]
        try:
            guard.see_loss(number, values[number])
        except Diverged:
            return steps[guard.above_since or 0]
    return None


def _rise_near_zero(losses: Sequence[float]) -> int | None:
    """Return the index from which a loss near 0 stays above three times the usual level, or None."""
    values = np.asarray(losses)
    # a policy's loss begins at exactly 0
    if len(values) < BEFORE + _PATIENCE or not (values > 0).all() or not np.isfinite(values).all():
        return None
    highest = np.lib.stride_tricks.sliding_window_view(values, BEFORE).max(axis=1)
    # the usual level: the lowest maximum of 16 successive losses
    level = float(highest[:-_PATIENCE].min())
    if not _LEVEL <= level <= _NATS:
        return None
    low = int(np.flatnonzero(values <= _TIMES * level)[-1])
    return low + 1 if len(values) - low > _PATIENCE else None
