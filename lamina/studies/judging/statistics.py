"""The statistics behind the verdicts. scipy does them; it is imported where it is used, since it takes a second."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
_RESAMPLES = 9999
_SEED = 20260130  # of the bootstrap's resamples: the same numbers give the same interval


class _Test(Protocol):
    """A test's result. scipy makes these classes at run time, so no checker sees their fields."""

    statistic: float
    pvalue: float


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The differences of two arms over the seeds that both have.

    Attributes:
        count: the number of pairs.
        mean, std: of the differences; the standard deviation has count - 1 in its denominator.
        interval: 95 % bootstrap interval of the mean.
        p: of the paired t test, two-sided; of the sign test, where all differences are equal (counts, shares).
        p_wilcoxon: of Wilcoxon's signed-rank test, two-sided; with 5 pairs it cannot fall below 0.0625.
    """

    count: int
    mean: float
    std: float
    interval: tuple[float, float]
    p: float
    p_wilcoxon: float


def paired(differences: Sequence[float]) -> Paired:
    """Statistics of at least two paired differences."""
    import numpy as np
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    p_wilcoxon = float(cast(_Test, stats.wilcoxon(values)).pvalue) if values.any() else 1.0
    return Paired(
        count=len(values),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)),
        interval=bootstrap_interval(differences),
        p=_equal_signs(differences) if _all_equal(differences) else t_test(differences),
        p_wilcoxon=p_wilcoxon,
    )


def _all_equal(values: Sequence[float]) -> bool:
    import numpy as np

    return float(np.std(values)) <= 1e-12 * max(1.0, abs(float(np.mean(values))))


def _equal_signs(differences: Sequence[float]) -> float:
    """The two-sided sign test's p of differences that are all equal, as counts and shares may be."""
    return 2.0 ** (1 - len(differences)) if any(differences) else 1.0


def wilcoxon_greater(differences: Sequence[float]) -> float:
    """The p of Wilcoxon's one-sided signed-rank test that differences lie above 0; 1 if all are 0."""
    from scipy import stats

    if not any(differences):
        return 1.0
    return float(cast(_Test, stats.wilcoxon(list(differences), alternative="greater")).pvalue)


def bootstrap_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, the same at each call.

    With few values it is narrower than it should be (of 3 it covers the mean in three cases of four), so no check
    rests on it alone.
    """
    import numpy as np
    from scipy import stats

    if len(values) < 2 or np.ptp(values) == 0:
        return float(np.mean(values)), float(np.mean(values))
    result = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        confidence_level=confidence,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def t_test(values: Sequence[float], *, mean: float = 0.0, alternative: str = "two-sided") -> float:
    """The t test's p that the values' mean is ``mean``. Values that are all equal are taken as exact: p is 0 or 1."""
    import numpy as np
    from scipy import stats

    if _all_equal(values):
        center = float(np.mean(values))
        shown = {"two-sided": center != mean, "less": center < mean, "greater": center > mean}
        return 0.0 if shown[alternative] else 1.0
    with _quiet():
        return float(cast(_Test, stats.ttest_1samp(values, mean, alternative=alternative)).pvalue)


def equivalence_test(differences: Sequence[float], within: float) -> float:
    """The p of two one-sided t tests (TOST) that the mean difference lies inside (-within, within)."""
    return max(
        t_test(differences, mean=-within, alternative="greater"), t_test(differences, mean=within, alternative="less")
    )


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of p values, in their order: p_(i) * (n - i + 1), never falling, at most 1.

    A NaN counts as 1.
    """
    ps = [1.0 if math.isnan(p) else p for p in ps]
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = largest
    return adjusted


def kendall(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Kendall's tau-b and its two-sided p. Tau is 0 where one side is constant."""
    from scipy import stats

    with _quiet():
        result = cast(_Test, stats.kendalltau(a, b))
    return (0.0, 1.0) if math.isnan(result.statistic) else (float(result.statistic), float(result.pvalue))


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best learning rate of a sweep.

    Attributes:
        rate: the parabola's lowest point, or the best trained rate at the sweep's edge.
        loss: the loss there.
        at_edge: whether the best trained rate is the sweep's first or last: the optimum may lie outside.
        trained: the best of the rates that were trained.
    """

    rate: float
    loss: float
    at_edge: bool
    trained: float


def parabola_optimum(losses: Mapping[float, float]) -> Optimum:
    """The optimum of loss over rate: a parabola in the log of the rate through the best point and its two neighbors.

    A rate whose loss is not finite counts as infinitely bad: it bounds the sweep but bends no parabola.
    """
    rates = sorted(losses)
    finite = [rate for rate in rates if math.isfinite(losses[rate])]
    if not finite:
        raise ValueError("no rate of the sweep has a finite loss")
    best = min(finite, key=lambda rate: losses[rate])
    place = rates.index(best)
    if place in (0, len(rates) - 1):
        return Optimum(rate=best, loss=losses[best], at_edge=True, trained=best)
    left, right = rates[place - 1], rates[place + 1]
    if not (math.isfinite(losses[left]) and math.isfinite(losses[right])):
        return Optimum(rate=best, loss=losses[best], at_edge=False, trained=best)
    x0, x2 = math.log(left / best), math.log(right / best)
    y0, y2 = losses[left] - losses[best], losses[right] - losses[best]
    slope = (y0 * x2 / x0 - y2 * x0 / x2) / (x2 - x0)
    curvature = (y2 / x2 - y0 / x0) / (x2 - x0)
    if curvature <= 0:
        return Optimum(rate=best, loss=losses[best], at_edge=False, trained=best)
    x = -slope / (2 * curvature)
    return Optimum(rate=best * math.exp(x), loss=losses[best] + x * slope / 2, at_edge=False, trained=best)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without scipy's warnings of nearly equal values: the result says it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
