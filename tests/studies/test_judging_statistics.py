"""The statistics behind the verdicts: tests and intervals, the spreads of a size, and laws of scaling."""

import itertools
import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scripts import loaded
from synthetic_trials import rows, trials

from lamina.papers.judging import statistics

ladder, pages = loaded("benchmarks/ladder_law.py"), loaded("docs/results_pages.py")

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


BASE = [3.000, 3.010, 3.020]


def sweep(arm, losses_by_rate, statuses="finished"):
    return [{**row, "learning_rate": rate} for rate, losses in losses_by_rate.items()
            for row in rows(arm, losses, statuses)]  # fmt: skip


def test_each_placement_has_its_best_rate_and_its_difference_to_pre_ln_there():
    pre = sweep("pre_ln", {1e-3: [3.2, 3.2, 3.2], 2e-3: BASE, 4e-3: [3.2, 3.2, 3.2]})
    keel = sweep("keel", {1e-3: [3.2, 3.2, 3.2], 2e-3: [3.1, 3.1, 3.1], 4e-3: [2.9, 2.92, 2.91]})
    post = sweep("post_ln", {2e-3: BASE}, "stuck")
    table = pages.spreads(trials(pre, keel, post)).set_index("placement")
    assert table.index.tolist() == ["keel", "pre_ln"]
    assert table["best_rate"].tolist() == [4e-3, 2e-3]
    assert table["at_edge"].tolist() == [True, False]
    assert table.loc["pre_ln", "optimum"] == pytest.approx(2e-3)
    assert table.loc["pre_ln", "std"] == pytest.approx(0.01)
    assert table.loc["keel", "difference"] == pytest.approx(-0.1)
    assert table.loc["keel", "paired_std"] == pytest.approx(0.01)
    assert table.loc["keel", "detectable"] == pytest.approx(pages.detectable(0.01, 5))
    assert math.isnan(table.loc["pre_ln", "paired_std"])


def test_what_is_detectable_has_a_power_of_ninety_percent():
    difference = pages.detectable(1.0, 8)
    limit = stats.t.ppf(0.975, 7)
    assert stats.nct.sf(limit, 7, difference * math.sqrt(8)) == pytest.approx(0.9, abs=0.02)


SIZES = {"S1": 0.42e6, "S2": 1.08e6, "S3": 3.4e6}
LAW = {"E": 1.5, "a": 0.35, "b": 0.37, "A": {"pre_ln": 90.0, "keel": 80.0}, "B": {"pre_ln": 260.0, "keel": 255.0}}


def drawn(noise=0.0, ratios=(2.5, 5, 10, 20), seeds=3, law=LAW):
    generator = np.random.default_rng(0)
    rows = []
    for (size, n), ratio, arm, seed in itertools.product(SIZES.items(), ratios, law["A"], range(seeds)):
        loss = law["E"] + law["A"][arm] * n ** -law["a"] + law["B"][arm] * (ratio * n) ** -law["b"]
        loss += generator.normal(0, noise)
        tokens = ratio * n
        rows.append(
            {"arm": arm, "size": size, "seed": seed, "parameters": n, "tokens": tokens, "ratio": ratio}
            | {"flops": 6 * n * tokens, "seconds": 6e-9 * n * tokens * (1.1 if arm == "keel" else 1.0)}
            | {"eval_loss": loss}
        )
    return pd.DataFrame(rows)


def test_the_fit_gives_back_the_law():
    law = ladder.fit_law(drawn())
    assert law.floor == pytest.approx(LAW["E"], rel=1e-3)
    assert (law.size_exponent, law.data_exponent) == pytest.approx((LAW["a"], LAW["b"]), rel=1e-2)
    assert law.loss("keel", 1e7, 2e8) == pytest.approx(1.5 + 80 * 1e7**-0.35 + 255 * 2e8**-0.37, abs=1e-3)
    assert law.error < 1e-5


def test_a_size_that_was_left_out_is_predicted():
    assert abs(ladder.left_out(drawn(), "S3")) < 2e-3
    assert abs(ladder.left_out(drawn(noise=0.01), "S3")) < 0.05
    jump = drawn()
    jump.loc[jump["size"] == "S3", "eval_loss"] += 0.2
    assert ladder.left_out(jump, "S3") > 0.15


def test_one_size_does_not_make_a_law():
    with pytest.raises(ValueError, match="two sizes"):
        ladder.fit_law(drawn().query("size == 'S1'"))


def test_the_gap_s_trend_is_the_line_through_the_pairs():
    trials = drawn(ratios=(10,))
    trend = ladder.gap_trend(trials, "keel", "pre_ln")
    gaps = {s: -10 * n**-0.35 - 5 * (10 * n) ** -0.37 for s, n in SIZES.items()}
    decades = [math.log10(60 * n * n) for n in SIZES.values()]
    slope, _ = np.polyfit(decades, list(gaps.values()), 1)
    assert trend.slope == pytest.approx(slope)
    assert trend.center == pytest.approx(np.mean(list(gaps.values())))
    assert trend.interval[0] <= trend.slope <= trend.interval[1]
    assert trend.points == 9


def test_the_trend_s_interval_covers_the_slope_as_often_as_it_says():
    generator, covered = np.random.default_rng(1), 0
    trials = drawn(ratios=(10,))
    ours = trials["arm"] == "keel"
    for _ in range(400):
        noisy = trials.assign(eval_loss=generator.normal(0, 0.02, len(trials)))
        noisy.loc[ours, "eval_loss"] += -0.1 + 0.05 * np.log10(noisy.loc[ours, "flops"])
        low, high = ladder.gap_trend(noisy, "keel", "pre_ln").interval
        covered += low <= 0.05 <= high
    assert 0.92 < covered / 400 < 0.98


def test_a_run_s_branches_are_no_pairs_of_their_own():
    with pytest.raises(ValueError, match="one number of tokens per parameter"):
        ladder.gap_trend(drawn(), "keel", "pre_ln")


def test_the_compute_gain_is_the_factor_that_the_other_arm_needs():
    trials = drawn(ratios=(10,))
    pre = trials["arm"] == "pre_ln"
    trials["eval_loss"] = 10 - np.log(trials["flops"]) / 10
    trials.loc[~pre, "eval_loss"] -= math.log(1.5) / 10
    gains = ladder.compute_gain(trials, "keel", "pre_ln")
    assert gains == {"S1": pytest.approx(1.5), "S2": pytest.approx(1.5)}, "nothing was seen beyond the largest"
    seconds = ladder.compute_gain(trials, "keel", "pre_ln", cost="seconds")
    assert seconds["S1"] == pytest.approx(1.5 / 1.1), "a slower step costs"


def test_the_tolerance_is_the_width_of_the_good_rates():
    losses = {1e-3: [2.1], 2e-3: [2.01], 4e-3: [2.0], 8e-3: [2.04], 16e-3: [math.inf]}
    assert pages.tolerance(losses) == pytest.approx(1 + (0.01 / 0.09) + 0.02 / 0.04)
    assert pages.tolerance({1e-3: [2.0], 2e-3: [math.inf]}) == 0
    assert pages.tolerance({1e-3: [2.0], 2e-3: [2.0]}) == 1, "the sweep's edge"
