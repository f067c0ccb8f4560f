"""The statistics of the verdicts. The functions import scipy when called, because this import takes a second."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, cast

from lamina.core.intervals import CONFIDENCE, mean_and_error

_DRAWS, _SEED = 2000, 20261123  # of the tau of means


class _Test(Protocol):
    """A test's result. Scipy makes these classes at run time, so type checkers cannot see their fields."""

    statistic: float
    pvalue: float


def share_interval(count: int, runs: int) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) 95 % interval of a share of runs."""
    from scipy import stats

    interval = stats.binomtest(count, runs).proportion_ci(confidence_level=CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)


def share_above(count: int, runs: int, share: float) -> float:
    """Test exactly whether a share of runs is above ``share``. Returns the one-sided p value, doubled."""
    from scipy import stats

    return min(1.0, 2 * float(stats.binom.sf(count - 1, runs, share)))


def shares_differ(counts: tuple[int, int], runs: tuple[int, int]) -> float:
    """Test with Fisher's exact test whether two shares of runs differ. Returns the two-sided p value."""
    from scipy import stats

    table = [[count, total - count] for count, total in zip(counts, runs, strict=True)]
    return float(cast(_Test, stats.fisher_exact(table)).pvalue)


def p_above(values: Sequence[float]) -> float:
    """Test whether the values' center is above 0. Returns the one-sided p value, doubled (2.5 % for each side).

    The test is Student's t test. If a value is infinite (a run that did not train, ranked last), the test is Wilcoxon's
    signed-rank test with the exact distribution. If all values are equal (counts, shares), the test is the sign test.
    """
    from scipy.special import stdtr

    if all(map(math.isfinite, values)):
        mean, error = mean_and_error(values)
        if error > 1e-12 * max(1.0, abs(mean)):
            return min(1.0, 2 * float(stdtr(len(values) - 1, -mean / error)))
    return min(1.0, 2 * _signed_ranks(values))


def _signed_ranks(values: Sequence[float]) -> float:
    """Return the share of sign patterns whose sum of positive ranks is at least the observed sum, ignoring zeros."""
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
    """Return Kendall's tau-b. If one side is constant, return 0."""
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nearly equal values: the result says it
        tau = float(cast(_Test, stats.kendalltau(a, b)).statistic)
    return 0.0 if math.isnan(tau) else tau


def tau_draws(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> list[float]:
    """Draw Kendall's tau between the arms' means. Each mean comes from the t distribution of the arm's values.

    An arm with one value counts as exactly known, and an arm without a value ranks last.
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
    tau = cache(kendall)  # only the orders count, and few arms have few of them
    return [tau(*both) for both in zip(*orders, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best learning rate of a sweep.

    Attributes:
        rate: the lowest point of the parabola, or the best trained rate if this rate is at the sweep's edge.
        at_edge: whether the best trained rate is the sweep's first or last rate, so that the optimum may be outside the
            sweep.
        trained: the best of the trained rates.
    """

    rate: float
    loss: float
    at_edge: bool
    trained: float


def parabola_optimum(losses: Mapping[float, float]) -> Optimum:
    """Find the learning rate with the lowest loss.

    Lamina fits a parabola over the logarithm of the rate to the best point and its two neighbors. If a learning rate's
    loss is not finite, the rate belongs to the sweep, but the parabola does not use it.
    """
    rates = sorted(losses)
    finite = [rate for rate in rates if math.isfinite(losses[rate])]
    if not finite:
        raise ValueError("no rate of the sweep has a finite loss")
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
