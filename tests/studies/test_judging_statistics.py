import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from lamina.papers.judging import statistics

DIFFERENCES = [-0.013, -0.011, -0.016, -0.012, -0.014]


def test_the_interval_and_the_test_are_students():
    expected = stats.t.interval(0.95, 4, np.mean(DIFFERENCES), stats.sem(DIFFERENCES))
    assert statistics.t_interval(DIFFERENCES) == pytest.approx(expected)
    assert statistics.p_above([-d for d in DIFFERENCES]) == pytest.approx(stats.ttest_1samp(DIFFERENCES, 0).pvalue)
    assert statistics.p_above(DIFFERENCES) == 1.0


@pytest.mark.parametrize("failed", [0, 1, 3])
def test_ranks_have_the_exact_distribution_of_all_signs(failed):
    values = [math.inf] * failed + [0.3, -0.1, 0.2, 0.25, -0.05, 0.0]
    ranks = stats.rankdata([abs(value) for value in values if value])
    observed = sum(rank for rank, value in zip(ranks, [v for v in values if v], strict=True) if value > 0)
    sums = [
        sum(rank for rank, up in zip(ranks, signs, strict=True) if up) for signs in product((0, 1), repeat=len(ranks))
    ]
    share = sum(total >= observed - 1e-9 for total in sums) / len(sums)
    assert statistics._signed_ranks(values) == pytest.approx(share)
    if failed:
        assert statistics.p_above(values) == pytest.approx(min(1.0, 2 * share))


def test_equal_values_have_the_sign_test():
    assert statistics.p_above([0.5, 0.5, 0.5]) == pytest.approx(0.25)
    assert statistics.p_above([0.0, 0.0, 0.0]) == statistics.p_above([-1.0] * 3) == 1.0


def test_shares_of_runs_have_exact_intervals_and_tests():
    assert statistics.share_interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert statistics.share_above(5, 5, 1 / 3) == pytest.approx(2 * 3**-5)
    assert statistics.shares_differ((5, 0), (5, 5)) == pytest.approx(2 / 252)


@pytest.mark.parametrize(
    ("ps", "adjusted"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 * .01; 2 * .03; max(.06, 1 * .04)
        ([0.5, 0.4], [0.8, 0.8]),
        ([0.9, 0.01, 0.02, 0.005], [0.9, 0.03, 0.04, 0.02]),
        ([], []),
    ],
)
def test_holm_by_hand(ps, adjusted):
    assert statistics.holm(ps) == pytest.approx(adjusted)


def test_the_optimum_is_the_parabolas_lowest_point_in_log_rate():
    losses = {rate: 3.0 + 0.1 * (math.log(rate) - math.log(4e-3)) ** 2 for rate in (1e-3, 2e-3, 5e-3, 1e-2)}
    found = statistics.parabola_optimum(losses)
    assert found.rate == pytest.approx(4e-3)
    assert found.loss == pytest.approx(3.0)
    assert (found.at_edge, found.trained) == (False, 5e-3)


def test_an_optimum_at_the_edge_says_so():
    found = statistics.parabola_optimum({1e-3: 3.2, 2e-3: 3.1, 4e-3: 3.0})
    assert (found.rate, found.at_edge) == (4e-3, True)


def test_a_rate_that_diverged_bounds_the_sweep():
    found = statistics.parabola_optimum({1e-3: 3.2, 2e-3: 3.1, 4e-3: math.inf})
    assert (found.rate, found.at_edge) == (2e-3, False)
    with pytest.raises(ValueError, match="finite"):
        statistics.parabola_optimum({1e-3: math.inf})


def test_kendalls_tau_is_scipys():
    assert statistics.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(
        stats.kendalltau([1, 2, 3, 4], [1, 2, 4, 3])[0]
    )
    assert statistics.kendall([1, 2, 3], [5, 5, 5]) == 0.0
