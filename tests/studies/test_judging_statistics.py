import math

import numpy as np
import pytest
from scipy import stats

from lamina.studies.judging import statistics

DIFFERENCES = [-0.013, -0.011, -0.016, -0.012, -0.014]


def test_paired_differences_have_scipys_t_and_wilcoxon():
    found = statistics.paired(DIFFERENCES)
    assert found.mean == pytest.approx(-0.0132)
    assert found.std == pytest.approx(np.std(DIFFERENCES, ddof=1))
    assert found.p == pytest.approx(stats.ttest_1samp(DIFFERENCES, 0).pvalue)
    assert found.p_wilcoxon == pytest.approx(0.0625)


def test_the_bootstrap_interval_is_the_same_each_time_and_near_the_exact_one():
    """Of five values there are 5^5 resamples: their percentiles are the interval's limit."""
    exact = np.percentile(
        [np.mean(x) for x in np.stack(np.meshgrid(*[DIFFERENCES] * 5), -1).reshape(-1, 5)], [2.5, 97.5]
    )
    first, second = (statistics.bootstrap_interval(DIFFERENCES) for _ in range(2))
    assert first == second
    assert first == pytest.approx(tuple(exact), abs=3e-4)


def test_equal_values_are_exact():
    assert statistics.bootstrap_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)
    assert statistics.t_test([0.5, 0.5, 0.5]) == 0.0
    assert statistics.t_test([0.0, 0.0, 0.0]) == 1.0
    assert statistics.t_test([0.5, 0.5], mean=1.0, alternative="less") == 0.0
    assert statistics.paired([0.0, 0.0, 0.0]).p_wilcoxon == 1.0


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


def test_equivalence_is_the_larger_of_two_one_sided_tests():
    lower = stats.ttest_1samp(DIFFERENCES, -0.02, alternative="greater").pvalue
    upper = stats.ttest_1samp(DIFFERENCES, 0.02, alternative="less").pvalue
    assert statistics.equivalence_test(DIFFERENCES, 0.02) == pytest.approx(max(lower, upper))
    assert statistics.equivalence_test(DIFFERENCES, 0.01) > 0.5


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
        tuple(stats.kendalltau([1, 2, 3, 4], [1, 2, 4, 3]))
    )
    assert statistics.kendall([1, 2, 3], [5, 5, 5]) == (0.0, 1.0)
