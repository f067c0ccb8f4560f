"""The ladder's analysis, on trials drawn from a law that is known."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from lamina.papers.judging.scaling import compute_gain, fit_law, gap_trend, left_out, tolerance

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
    law = fit_law(drawn())
    assert law.floor == pytest.approx(LAW["E"], rel=1e-3)
    assert (law.size_exponent, law.data_exponent) == pytest.approx((LAW["a"], LAW["b"]), rel=1e-2)
    assert law.loss("keel", 1e7, 2e8) == pytest.approx(1.5 + 80 * 1e7**-0.35 + 255 * 2e8**-0.37, abs=1e-3)
    assert law.error < 1e-5


def test_a_size_that_was_left_out_is_predicted():
    assert abs(left_out(drawn(), "S3")) < 2e-3
    assert abs(left_out(drawn(noise=0.01), "S3")) < 0.05
    jump = drawn()
    jump.loc[jump["size"] == "S3", "eval_loss"] += 0.2
    assert left_out(jump, "S3") > 0.15


def test_one_size_does_not_make_a_law():
    with pytest.raises(ValueError, match="two sizes"):
        fit_law(drawn().query("size == 'S1'"))


def test_the_gap_s_trend_is_the_line_through_the_pairs():
    trials = drawn(ratios=(10,))
    trend = gap_trend(trials, "keel", "pre_ln")
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
        low, high = gap_trend(noisy, "keel", "pre_ln").interval
        covered += low <= 0.05 <= high
    assert 0.92 < covered / 400 < 0.98


def test_a_run_s_branches_are_no_pairs_of_their_own():
    with pytest.raises(ValueError, match="one number of tokens per parameter"):
        gap_trend(drawn(), "keel", "pre_ln")


def test_the_compute_gain_is_the_factor_that_the_other_arm_needs():
    trials = drawn(ratios=(10,))
    pre = trials["arm"] == "pre_ln"
    trials["eval_loss"] = 10 - np.log(trials["flops"]) / 10
    trials.loc[~pre, "eval_loss"] -= math.log(1.5) / 10
    gains = compute_gain(trials, "keel", "pre_ln")
    assert gains == {"S1": pytest.approx(1.5), "S2": pytest.approx(1.5)}, "nothing was seen beyond the largest"
    seconds = compute_gain(trials, "keel", "pre_ln", cost="seconds")
    assert seconds["S1"] == pytest.approx(1.5 / 1.1), "a slower step costs"


def test_the_tolerance_is_the_width_of_the_good_rates():
    losses = {1e-3: [2.1], 2e-3: [2.01], 4e-3: [2.0], 8e-3: [2.04], 16e-3: [math.inf]}
    assert tolerance(losses) == pytest.approx(1 + (0.01 / 0.09) + 0.02 / 0.04)
    assert tolerance({1e-3: [2.0], 2e-3: [math.inf]}) == 0
    assert tolerance({1e-3: [2.0], 2e-3: [2.0]}) == 1, "the sweep's edge"
