"""Compare a metric's value with past values of the same layer, for the alarm rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lamina.training.monitor.writers import BETWEEN, NORM, Row

WINDOW = 32  # the number of latest values with which a value is compared
DEVIATIONS = 5.0  # a value is unusual if it is this many robust deviations away, and beyond the fitted limit
EVERY_STEP, RECORDS = 8, 4  # the fewest values for a comparison: with a value per step, and with a value per record
LEAST = 0.15  # a smaller score (the logarithm of a factor) is ignored
INTERVAL = 20  # the usual steps between two records. With more steps, a series may move further in proportion
SOON = 4  # the fewest steps since the last record for judging a pace


class Judgment(NamedTuple):
    """The result of a rule for a measurement."""

    rule: str
    row: Row
    usual: float
    unusual: bool  # whether the value is outside its usual range
    name: str = ""  # the name of the rule's fitted limit, or ""
    score: float = 0.0  # the number to compare with this limit


@dataclass(frozen=True, kw_only=True)
class Past:
    """The comparison of a metric's value with past values of the same layer and role."""

    rises: bool = True  # whether a value above the past values can be an alarm
    falls: bool = False  # whether a value below the past values can be an alarm
    fewest: int = RECORDS  # the number of past values that a comparison needs
    calm: float = 0.0  # the value that a rise must exceed, because a gain may start at 0


PASTS: Mapping[str, Past] = {
    "gradient_norm": Past(fewest=EVERY_STEP),
    NORM: Past(fewest=EVERY_STEP),
    "first_moment": Past(),
    "second_moment": Past(rises=False, falls=True),
    "update_norm": Past(),
    "hidden_abs_max": Past(),
    "hidden_variance": Past(),
    "attention_logit": Past(calm=10.0),
    "gain_abs_max": Past(calm=4.0),
    "gain_mean": Past(rises=False, falls=True),
    "row_norm_abs_max": Past(),
    "row_norm_mean": Past(rises=False, falls=True),
    "weight_norm": Past(falls=True),
    "experts_used": Past(rises=False, falls=True),
}
COURSES: Mapping[str, float] = {
    **dict.fromkeys(("gain_mean", "gain_abs_max", "weight_norm"), 0.0),
    "row_norm_mean": 0.1,  # an output head that starts near zero
    "row_norm_abs_max": 0.25,  # at a high rate, SGD moves a frequent token's row from 0.16 to 2
    "hidden_variance": 1.0,
    "hidden_abs_max": 10.0,  # of a stream that begins at 0.02, under Muon's usual rates too
}
"""Metrics that must not rise or fall steadily over many records. A rise counts only if it ends above the number."""
PACES = {f"{BETWEEN}{metric}" for metric in ("gain_mean", "gain_abs_max", "row_norm_mean", "row_norm_abs_max")}
"""Metrics of the steps between two records. Lamina judges how fast these metrics change after a record."""


def earlier_peak(recent: Collection[float]) -> float:
    """Return the largest value, but ignore the latest values if all of them exceed all earlier values."""
    recent, count = [*recent], len(recent)
    peaks = [max(recent[:at]) for at in range(count // 2 + 1, count) if min(recent[at:]) > max(recent[:at])]
    return peaks[0] if peaks else max(recent)


def leaving(value: float, recent: Sequence[float], sign: float, gaps: float, shrinks: bool) -> tuple[float, float]:
    """Return the usual value, and the score of ``value``: |log(value / usual)|, or 0 within the noise.

    The usual value is the median of ``recent`` or the trend, whichever is nearer to ``value``. The trend continues the
    change between the last two values, over ``gaps`` times the interval between these values.

    For a metric that is measured at every step, ``gaps`` is 0. The trend then continues the change between the medians
    of the two halves of ``recent``. After ``WINDOW`` values, such a metric has no trend, because gradients change fast
    only when training begins.

    With ``shrinks``, for falling weights that may have grown before, the median is at least the median of the latest 4
    values. Then only past falls count as noise.
    """
    usual, half = statistics.median(recent), len(recent) // 2
    if shrinks:
        usual = max(usual, statistics.median(list(recent)[-RECORDS:]))
    last, before, steps = recent[-1], recent[-2], gaps
    young = not gaps and len(recent) < WINDOW
    if young:
        last, before = statistics.median(list(recent)[-half:]), statistics.median(list(recent)[:half])
        steps = 0.5 + 0.5 / half  # from the middle of the last half on, in halves
    if (gaps or young) and before > 0 and last > 0:
        ahead = last * (max if sign > 0 else min)(1.0, last / before) ** steps
        usual = max(usual, ahead) if sign > 0 else min(usual, ahead)
    if not usual > 0 or sign * (value - usual) <= 0:
        return usual, 0.0
    distance = abs(math.log(max(value, 1e-30) / usual))
    if distance < LEAST:
        return usual, 0.0
    logs = [math.log(max(x, 1e-30)) for x in recent]
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in logs)
    if shrinks:
        spread = statistics.fmean(max(0.0, earlier - later) for earlier, later in pairwise(logs))
    return usual, distance if distance > DEVIATIONS * spread else 0.0


def pace_of(value: float, recent: Sequence[float], sign: float, steps: int, gap: int) -> tuple[float, float]:
    """Return the usual value, and how far the series would move in 20 steps at the pace since the last record.

    The second number is |log(factor)|. This number is 0 if the value is near the median of ``recent``, or if the series
    often moves at this pace.

    Args:
        sign: 1 to judge a rise, and -1 to judge a fall.
        steps: the steps since the last record.
        gap: the steps between the last two records.
    """
    usual = max(statistics.median(recent), statistics.median(list(recent)[-RECORDS:]))
    if not (min(recent) > 0 and value > 0) or sign * math.log(value / usual) < LEAST:
        return usual, 0.0
    moves = [sign * math.log(later / earlier) for earlier, later in pairwise(recent)]
    pace = sign * math.log(value / recent[-1]) / steps
    usually = statistics.fmean(max(0.0, move) for move in moves) / max(1, gap)
    return usual, INTERVAL * pace if pace > DEVIATIONS * usually else 0.0
