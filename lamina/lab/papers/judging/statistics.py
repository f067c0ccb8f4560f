"""The statistical tests behind the verdicts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, cast

from lamina.core.intervals import CONFIDENCE, mean_and_error

_DRAWS, _SEED = 2000, 20261123  # for the random samples of tau


class _Test(Protocol):
    statistic: float
    pvalue: float


def share_interval(count: int, runs: int) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) 95 % interval of a proportion."""
    from scipy import stats

    interval = stats.binomtest(count, runs).proportion_ci(confidence_level=CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)


def share_above(count: int, runs: int, share: float) -> float:
    """Test whether a proportion is above a limit (exact binomial test). Returns twice the one-sided p value."""
    from scipy import stats

    return min(1.0, 2 * float(stats.binom.sf(count - 1, runs, share)))


def shares_differ(counts: tuple[int, int], runs: tuple[int, int]) -> float:
    """Compare two proportions with Fisher's exact test. Returns the two-sided p value."""
    from scipy import stats

    table = [[count, total - count] for count, total in zip(counts, runs, strict=True)]
    return float(cast(_Test, stats.fisher_exact(table)).pvalue)


def p_above(values: Sequence[float]) -> float:
    """Test whether the values' mean or median is above 0. Returns twice the one-sided p value.

    The test is Student's t test. If a value is infinite (a failed run) or all values are equal, the test is Wilcoxon's
    exact signed-rank test.
    """
    from scipy.special import stdtr

    if all(map(math.isfinite, values)):
        mean, error = mean_and_error(values)
        if error > 1e-12 * max(1.0, abs(mean)):
            return min(1.0, 2 * float(stdtr(len(values) - 1, -mean / error)))
    return min(1.0, 2 * _signed_ranks(values))


def _signed_ranks(values: Sequence[float]) -> float:
    """Return the one-sided p value of Wilcoxon's exact signed-rank test. The test ignores zeros."""
    import numpy as np
    from scipy import stats

    differences = np.asarray([value for value in values if abs(value) > 1e-12])
    doubled = np.rint(2 * stats.rankdata(np.abs(differences))).astype(int)  # ties have half ranks
    ways = np.zeros(int(doubled.sum()) + 1)
    ways[0] = 1.0
    for rank in doubled:
        ways[rank:] = ways[rank:] + ways[:-rank]
    return float(ways[int(doubled[differences > 0].sum()) :].sum() / ways.sum())


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Kendall's tau-b, or 0 if all values in one sequence are equal."""
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns about nearly equal values
        tau = float(cast(_Test, stats.kendalltau(a, b)).statistic)
    return 0.0 if math.isnan(tau) else tau


def tau_draws(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> list[float]:
    """Draw random samples of Kendall's tau between two lists of means.

    Each sample draws means from t distributions. A mean of one value is fixed. A mean without values ranks last.
    """
    import numpy as np
    from scipy import stats

    random = np.random.default_rng(_SEED)

    def drawn(arm: Sequence[float]) -> list[float]:
        if len(arm) < 2:
            return [arm[0] if arm else math.inf] * _DRAWS
        error = float(np.std(arm, ddof=1)) / math.sqrt(len(arm))
        return (float(np.mean(arm)) + error * random.standard_t(len(arm) - 1, _DRAWS)).tolist()

    sides = ([drawn(arm) for arm in side] for side in (a, b))
    orders = (map(tuple, stats.rankdata(side, axis=0).T) for side in sides)
    tau = cache(kendall)  # tau depends only on the orders, and few arms have few orders
    return [tau(*both) for both in zip(*orders, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best learning rate of a sweep.

    Attributes:
        rate: the learning rate at the fitted parabola's minimum, or the best learning rate that ran.
        loss: the loss at ``rate``.
        at_edge: whether the best learning rate that ran is the lowest or the highest.
        trained: the best learning rate that ran.
    """

    rate: float
    loss: float
    at_edge: bool
    trained: float


def parabola_optimum(losses: Mapping[float, float]) -> Optimum:
    """Estimate the learning rate with the lowest loss.

    Lamina fits a parabola to the losses at the best learning rate and both neighbors, over the logarithm of the
    learning rate. Without two neighbors that have finite losses, the result is the best learning rate that ran.
    """
    rates = sorted(losses)
    finite = [rate for rate in rates if math.isfinite(losses[rate])]
    if not finite:
        raise ValueError("no learning rate of the sweep has a finite loss")
    best = min(finite, key=lambda rate: losses[rate])
    middle = rates.index(best)
    lowest = Optimum(rate=best, loss=losses[best], at_edge=middle in (0, len(rates) - 1), trained=best)
    if lowest.at_edge or not all(math.isfinite(losses[rates[each]]) for each in (middle - 1, middle + 1)):
        return lowest
    left, right = rates[middle - 1], rates[middle + 1]
    x0, x2 = math.log(left / best), math.log(right / best)
    y0, y2 = losses[left] - losses[best], losses[right] - losses[best]
    slope = (y0 * x2 / x0 - y2 * x0 / x2) / (x2 - x0)
    curvature = (y2 / x2 - y0 / x0) / (x2 - x0)
    if curvature <= 0:
        return lowest
    x = -slope / (2 * curvature)
    return replace(lowest, rate=best * math.exp(x), loss=losses[best] + x * slope / 2)
