"""Checks of arms against each other, and the statistics behind them."""

import itertools
import json
import math
import re
from itertools import product

import numpy as np
import pandas as pd
import pytest
from lab.papers.synthetic_trials import rows, trials
from scipy import stats
from scripts import loaded

from lamina.core.intervals import holm, t_interval
from lamina.errors import UserError
from lamina.lab.papers import judging
from lamina.lab.papers.judging import (
    NotMeasured,
    Trials,
    equivalent,
    fails_to_train,
    higher,
    lower,
    no_worse,
    ordered,
    statistics,
    trains,
    values_of,
)
from lamina.lab.papers.study_catalog import records_folder

BASE = [3.000, 3.010, 3.020, 3.005, 3.015]
NOISE = [0.001, -0.002, 0.0005, -0.001, 0.0015]


def shifted(by, noise=NOISE):
    return [base + by + extra for base, extra in zip(BASE, noise, strict=True)]


def test_a_clear_difference_holds_and_its_reverse_fails():
    both = trials(rows("keel", shifted(-0.02)), rows("pre_ln", BASE))
    found = lower(both, "keel", than="pre_ln")
    assert found.verdict == "holds"
    assert found.margin == pytest.approx(-0.02)
    assert found.interval[0] < -0.02 < found.interval[1] < 0
    assert found.seeds == 5
    assert found.ours == "keel 2.99 vs pre_ln 3.01: difference -0.02 (95 % -0.0218 to -0.0182, 5 seeds, p < 0.001)"
    assert lower(both, "pre_ln", than="keel").verdict == "reversed"
    assert higher(both, "pre_ln", than="keel").verdict == "holds"
    assert higher(both, "keel", than="pre_ln").verdict == "reversed"


def test_the_seeds_spread_makes_it_inconclusive():
    noise = [0.05, -0.06, 0.04, -0.05, 0.0]
    both = trials(rows("keel", shifted(-0.01, noise)), rows("pre_ln", BASE))
    assert lower(both, "keel", than="pre_ln").verdict == "inconclusive"
    assert equivalent(both, "keel", "pre_ln", within=0.02).verdict == "inconclusive"


def test_equal_arms_are_not_lower_and_are_equivalent():
    both = trials(rows("keel", shifted(0.0)), rows("pre_ln", BASE))
    assert lower(both, "keel", than="pre_ln").verdict == "excluded"  # a difference of .01 is
    assert lower(both, "keel", than="pre_ln", by=0.0001).verdict == "inconclusive"
    assert equivalent(both, "keel", "pre_ln", within=0.02).verdict == "holds"
    apart = trials(rows("keel", shifted(-0.1)), rows("pre_ln", BASE))
    assert equivalent(apart, "keel", "pre_ln", within=0.02).verdict == "fails"


def test_level_or_lower_is_no_worse():
    level = trials(rows("keel", shifted(0.003)), rows("pre_ln", BASE))
    assert no_worse(level, "keel", than="pre_ln").verdict == "holds"
    assert no_worse(level, "keel", than="pre_ln", within=0.0005).verdict == "reversed"
    assert no_worse(level, "keel", than="pre_ln", within=0.003).verdict == "inconclusive"
    assert no_worse(trials(rows("keel", BASE), rows("pre_ln", BASE, "stuck")), "keel", than="pre_ln").verdict == "holds"


def test_pairs_are_by_seed_whatever_the_rows_order():
    both = trials(rows("keel", shifted(-0.02)), rows("pre_ln", BASE))
    mixed = Trials(both.table.sample(frac=1, random_state=1), axes=both.axes)
    assert lower(mixed, "keel", than="pre_ln").margin == pytest.approx(-0.02)


def test_two_seeds_are_too_few():
    both = trials(rows("keel", [2.0, 2.0]), rows("pre_ln", [3.0, 3.1]))
    found = lower(both, "keel", than="pre_ln")
    assert (found.verdict, found.seeds) == ("inconclusive", 2)
    assert "fewer than 3" in found.note


def test_a_difference_below_the_smallest_that_counts_does_not_hold():
    small = trials(rows("keel", shifted(-0.004)), rows("pre_ln", BASE))
    found = lower(small, "keel", than="pre_ln")
    assert found.p < 0.05
    assert found.verdict == "excluded"
    assert lower(small, "keel", than="pre_ln", by=0.003).verdict == "holds"
    with pytest.raises(UserError, match="by: give the smallest difference that matters for 'spikes'"):
        lower(trials(rows("a", BASE, spikes=1), rows("b", BASE, spikes=2)), "a", than="b", column="spikes")


def test_what_fails_is_as_strict_as_what_holds():
    noise = [0.03, -0.02, 0.015, -0.01, 0.0]
    for by in (-0.03, -0.02, -0.01, 0.01, 0.02, 0.03):
        both = trials(rows("keel", shifted(by, noise)), rows("pre_ln", BASE))
        found, exchanged = lower(both, "keel", than="pre_ln"), lower(both, "pre_ln", than="keel")
        assert (found.verdict == "holds") == (exchanged.verdict == "reversed")
        assert (found.verdict == "reversed") == (exchanged.verdict == "holds")


def test_runs_that_failed_are_ranked_last_and_counted():
    statuses = ["finished", "diverged", "finished", "finished", "finished"]
    both = trials(rows("keel", shifted(-0.02)), rows("pre_ln", [3.0, 9.9, 3.02, 3.005, 3.015], statuses))
    found = lower(both, "keel", than="pre_ln")
    assert (found.verdict, found.seeds) == ("inconclusive", 5), "five pairs of ranks cannot show it: p 0.0625"
    assert found.p == pytest.approx(2 * 0.5**5)
    assert (
        found.note == "in the setting pre_ln, 1 of 5 runs diverged (95 % interval of the share that failed: 1% to 72%)"
    )
    said = "keel vs pre_ln, failed runs ranked last: lower in 5 of 5 pairs, median difference -0.0195"
    assert found.ours.startswith(said)
    eight = [3.0 + 0.01 * seed for seed in range(8)]
    one = trials(rows("keel", [loss - 0.05 for loss in eight]), rows("pre_ln", eight, ["stuck", *["finished"] * 7]))
    assert lower(one, "keel", than="pre_ln").verdict == "holds"
    assert list(values_of(both, "pre_ln")) == [0, 2, 3, 4]


def test_an_arm_that_fails_more_often_than_its_rival_does_not_win():
    losses = [3.0 + 0.01 * seed for seed in range(12)]
    ends = ["stuck", *["finished"] * 11]
    both = trials(rows("keel", [loss - 0.1 for loss in losses], ends), rows("pre_ln", losses))
    found = lower(both, "keel", than="pre_ln")
    assert found.p < 0.05
    assert found.verdict == "inconclusive"
    assert "keel failed more often (1 of 12) than pre_ln (0 of 12)" in found.note
    assert lower(both, "pre_ln", than="keel").verdict == "inconclusive"
    assert higher(both, "pre_ln", than="keel").verdict == "inconclusive"
    assert no_worse(both, "keel", than="pre_ln").verdict == "inconclusive"


@pytest.mark.parametrize("check", [lower, higher, equivalent, no_worse])
def test_two_arms_that_have_not_learned_have_no_order(check):
    short = ["short", "short", "finished", "short"]
    table = trials(rows("a", [3.51, 3.52, 3.50, 3.51], short), rows("b", [3.53, 3.54, 3.52, 3.53], short))
    found = check(table, "a", "b") if check is equivalent else check(table, "a", than="b")
    assert found.verdict == "inconclusive"
    assert found.ours in ("a 3.51 vs b 3.53", "b 3.53 vs a 3.51")
    assert found.note in ("neither a nor b has learned yet", "neither b nor a has learned yet")


def test_runs_that_are_short_are_compared_and_counted():
    table = trials(rows("a", [3.51, 3.52, 3.5], ["short", "short", "finished"]), rows("b", [3.6, 3.62, 3.61]))
    assert lower(table, "a", than="b").note == "in the setting a, 2 of 3 runs are too short to tell"


def test_an_arm_that_does_not_train_is_worse_than_any_that_does():
    stuck = ["stuck", "stuck", "diverged", "stuck", "stuck"]
    both = trials(rows("post_ln", [2.0] * 5, stuck), rows("pre_ln", BASE))
    found = lower(both, "pre_ln", than="post_ln")
    assert found.verdict == "holds"
    ending = "pre_ln 3.01 vs post_ln does not train (4 got stuck and 1 diverged of 5 runs)"
    assert found.ours == f"{ending} (Fisher's exact test for different fractions of failed runs: p 0.0079)"
    assert lower(both, "post_ln", than="pre_ln").verdict == "reversed"
    assert higher(both, "post_ln", than="pre_ln").verdict == "holds"
    assert equivalent(both, "post_ln", "pre_ln").verdict == "fails"
    assert fails_to_train(both, "post_ln").verdict == "holds"
    assert trains(both, "post_ln").verdict == "reversed"
    assert fails_to_train(both, "pre_ln").verdict == "reversed"
    assert trains(both, "pre_ln").ours == "pre_ln: 5 of 5 seeds trained (5 finished), share 95 % 48% to 100%"
    assert fails_to_train(trials(rows("post_ln", BASE[:3], "stuck")), "post_ln").verdict == "inconclusive"


def test_of_two_arms_that_do_not_train_none_is_lower():
    both = trials(rows("post_ln", BASE, "stuck"), rows("admin", BASE, "diverged"))
    assert lower(both, "post_ln", than="admin").verdict == "inconclusive"


def test_an_error_says_nothing_about_an_arm():
    both = trials(rows("post_ln", BASE, "failed"), rows("pre_ln", BASE))
    assert lower(both, "pre_ln", than="post_ln").verdict == "inconclusive"
    assert fails_to_train(both, "post_ln").verdict == "inconclusive"


def test_half_of_the_seeds_is_neither_training_nor_failing():
    both = trials(rows("pre_ln", [3.0] * 4, ["diverged", "finished", "diverged", "finished"]))
    assert trains(both, "pre_ln").verdict == fails_to_train(both, "pre_ln").verdict == "inconclusive"


def test_an_order_is_each_neighbor():
    mixed = rows("mix_ln", shifted(-0.04, NOISE[::-1]))
    three = trials(mixed, rows("pre_ln", shifted(-0.02)), rows("deepnorm", BASE))
    assert ordered(three, ["mix_ln", "pre_ln", "deepnorm"]).verdict == "holds"
    assert ordered(three, ["pre_ln", "mix_ln", "deepnorm"]).verdict == "a part failed"
    found = ordered(three, ["pre_ln", "mix_ln", "deepnorm"])
    assert [part.partition(": difference")[0] for part in found.parts] == [
        "reversed: pre_ln 2.99 vs mix_ln 2.97",
        "holds: mix_ln 2.97 vs deepnorm 3.01",
    ], "each link with its own verdict, what decides first"


def test_other_columns_are_compared_and_a_diverged_run_keeps_them_if_asked():
    statuses = ["finished", "finished", "finished", "diverged", "diverged"]
    spiky = rows("pre_ln", BASE, statuses)
    calm = rows("peri_ln", BASE)
    for row, count in zip(spiky + calm, [3, 4, 5, 9, 8, 0, 1, 0, 1, 0], strict=True):
        row["gradient_spikes"] = count
    both = trials(spiky, calm)
    assert lower(both, "peri_ln", than="pre_ln", column="gradient_spikes", by=1.0).seeds == 3
    found = lower(both, "peri_ln", than="pre_ln", column="gradient_spikes", by=1.0, any_status=True)
    assert (found.verdict, found.seeds) == ("holds", 5)


def test_an_arm_of_several_axes_is_named_by_its_values():
    deep, wide = (rows(arm, losses, axis="arm", placement="keel") for arm, losses in
                  (("deep", shifted(-0.02)), ("wide", BASE)))  # fmt: skip
    both = trials(deep, wide, axes=("placement", "arm", "seed"))
    assert lower(both, "deep", than="wide").verdict == "holds"
    assert lower(both, {"arm": "deep", "placement": "keel"}, than={"arm": "wide"}).verdict == "holds"
    assert both.arms() == [{"placement": "keel", "arm": "deep"}, {"placement": "keel", "arm": "wide"}]
    assert both.where(arm="deep").seeds == [0, 1, 2, 3, 4]
    with pytest.raises(NotMeasured, match="keel as one configuration, because its trials differ in arm"):
        lower(both, "keel", than="wide")


def test_what_no_trial_has_is_not_measured():
    one = trials(rows("pre_ln", BASE))
    with pytest.raises(NotMeasured, match=r"'keel' \(measured: pre_ln\)"):
        lower(one, "keel", than="pre_ln")
    with pytest.raises(NotMeasured, match="column 'eval_los'; did you mean 'eval_loss'"):
        lower(one, "pre_ln", than="pre_ln", column="eval_los")
    with pytest.raises(NotMeasured, match=r"seed 7 \(measured: 0, 1"):
        one.where(seed=[0, 7])
    with pytest.raises(NotMeasured, match="hidden_states at end"):
        one.measure("hidden_states")


def test_the_tuned_trials_are_those_at_the_arms_rate():
    sweep = rows("keel", BASE) + [{**row, "learning_rate": 1e-2, "tuned": False} for row in rows("keel", BASE)]
    both = trials(sweep, rows("pre_ln", BASE))
    assert len(both.tuned()) == 10
    with pytest.raises(NotMeasured, match="learning_rate"):
        lower(both, "keel", than="pre_ln")
    assert lower(both.tuned(), "keel", than="pre_ln").seeds == 5
    assert both.where(learning_rate=1e-2).seeds == [0, 1, 2, 3, 4]


def test_the_optimum_of_an_arm_counts_diverged_rates_as_infinitely_bad():
    both = sweep("keel", {1e-3: [3.2] * 3, 2e-3: [3.1] * 3}), sweep("keel", {4e-3: [1.0] * 3}, "diverged")
    assert judging.optimum(trials(*both), "keel").rate == 2e-3


def test_a_run_that_failed_takes_no_rate_from_the_optimum():
    ran = sweep("keel", {1e-3: [3.2] * 3, 2e-3: [3.0] * 3, 4e-3: [3.1] * 3})
    ran[4] |= {"status": "failed", "eval_loss": None}
    assert judging.optimum(trials(ran), "keel").trained == 2e-3


def test_tables_of_probes_have_their_trials_in_front():
    def read(key, name, at):
        frame = pd.DataFrame({"layer": [0, 1], "value": [1.0, 2.0], "seed": [9, 9]})
        return frame if (name, at) == ("gradients", "init") and not key.endswith("-1") else None

    table = trials(rows("keel", BASE[:3]), axes=(), measures=read).measure("gradients", at="init")
    assert table.columns.tolist() == ["placement", "learning_rate", "seed", "key", "layer", "value", "gradients_seed"]
    assert table["seed"].tolist() == [0, 0, 2, 2]
    assert table.groupby("seed")["value"].sum().to_dict() == {0: 3.0, 2: 3.0}


ladder, pages = loaded("docs/ladder_law.py"), loaded("docs/results_pages.py")

DIFFERENCES = [-0.013, -0.011, -0.016, -0.012, -0.014]


def test_the_interval_and_the_test_are_students():
    expected = stats.t.interval(0.95, 4, np.mean(DIFFERENCES), stats.sem(DIFFERENCES))
    assert t_interval(DIFFERENCES) == pytest.approx(expected)
    assert statistics.p_above([-d for d in DIFFERENCES]) == pytest.approx(stats.ttest_1samp(DIFFERENCES, 0).pvalue)
    assert statistics.p_above(DIFFERENCES) == statistics.p_above([0.0] * 3) == 1.0


@pytest.mark.parametrize("failed", [0, 1, 3])
def test_ranks_have_the_exact_distribution_of_all_signs(failed):
    values = [math.inf] * failed + [0.3, -0.1, 0.2, 0.25, -0.05, 0.0]
    ranks = stats.rankdata([abs(value) for value in values if value])
    observed = sum(rank for rank, value in zip(ranks, [v for v in values if v], strict=True) if value > 0)
    sums = [sum(r for r, up in zip(ranks, signs, strict=True) if up) for signs in product((0, 1), repeat=len(ranks))]
    share = sum(total >= observed - 1e-9 for total in sums) / len(sums)
    assert statistics._signed_ranks(values) == pytest.approx(share)
    if failed:
        assert statistics.p_above(values) == pytest.approx(min(1.0, 2 * share))


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
    assert holm(ps) == pytest.approx(adjusted)


def test_the_optimum_is_the_parabolas_lowest_point_in_log_rate():
    losses = {rate: 3.0 + 0.1 * (math.log(rate) - math.log(4e-3)) ** 2 for rate in (1e-3, 2e-3, 5e-3, 1e-2)}
    found = statistics.parabola_optimum(losses)
    assert found.rate == pytest.approx(4e-3)
    assert found.loss == pytest.approx(3.0)
    assert (found.at_edge, found.trained) == (False, 5e-3)


@pytest.mark.parametrize(("last", "rate", "at_edge"), [(3.0, 4e-3, True), (math.inf, 2e-3, False)])
def test_an_optimum_at_the_edge_says_so_and_a_rate_that_diverged_bounds_the_sweep(last, rate, at_edge):
    found = statistics.parabola_optimum({1e-3: 3.2, 2e-3: 3.1, 4e-3: last})
    assert (found.rate, found.at_edge) == (rate, at_edge)
    with pytest.raises(ValueError, match="finite"):
        statistics.parabola_optimum({1e-3: math.inf})


def test_kendalls_tau_is_scipys():
    one, other = [1, 2, 3, 4], [1, 2, 4, 3]
    assert statistics.kendall(one, other) == pytest.approx(stats.kendalltau(one, other)[0])
    assert statistics.kendall([1, 2, 3], [5, 5, 5]) == 0.0


THREE = [3.000, 3.010, 3.020]


def sweep(arm, losses_by_rate, statuses="finished"):
    return [{**row, "learning_rate": rate} for rate, losses in losses_by_rate.items()
            for row in rows(arm, losses, statuses)]  # fmt: skip


def test_each_placement_has_its_best_rate_and_its_difference_to_pre_ln_there():
    pre = sweep("pre_ln", {1e-3: [3.2, 3.2, 3.2], 2e-3: THREE, 4e-3: [3.2, 3.2, 3.2]})
    keel = sweep("keel", {1e-3: [3.2, 3.2, 3.2], 2e-3: [3.1, 3.1, 3.1], 4e-3: [2.9, 2.92, 2.91]})
    post = sweep("post_ln", {2e-3: THREE}, "stuck")
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
    for _ in range(200):
        noisy = trials.assign(eval_loss=generator.normal(0, 0.02, len(trials)))
        noisy.loc[ours, "eval_loss"] += -0.1 + 0.05 * np.log10(noisy.loc[ours, "flops"])
        low, high = ladder.gap_trend(noisy, "keel", "pre_ln").interval
        covered += low <= 0.05 <= high
    assert 0.91 < covered / 200 < 0.985


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


def test_the_ladders_page_gives_the_claims_differences_and_intervals():
    page = loaded("docs/ladder_page.py")
    found = page.gaps(page.losses(records_folder()))
    ends = found[found["per_parameter"] == 20].set_index(["size", "arm"])
    for size, study in (("S1", "ladder-s1"), ("S2", "ladder-s2")):
        for claim in json.loads((records_folder() / f"{study}-cpu" / "claims.json").read_text("utf-8")):
            ours = ends.loc[size, claim["claim"].partition("/")[2].replace("-", "_") or "fusenorm"]
            said = re.search(r"difference (\S+) \(95 % (\S+) to (\S+),", claim["ours"])
            for text, value in zip(said.groups(), ours[["gap", "low", "high"]], strict=True):
                assert float(text) == pytest.approx(value, rel=0.01)
