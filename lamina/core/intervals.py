"""Statistics of paired numbers. Each function imports scipy only when it runs, because the import is slow."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval (Student's t) of the mean of at least two values."""
    from scipy.special import stdtrit

    mean, error = mean_and_error(values)
    reach = float(stdtrit(len(values) - 1, 1 - ALPHA / 2)) * error
    return mean - reach, mean + reach


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values, and the mean's standard error."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down method, in the order of the input. Lamina treats NaN as 1."""
    ps = [1.0 if math.isnan(p) else p for p in ps]
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = largest
    return adjusted
