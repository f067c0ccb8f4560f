import pandas as pd
import pytest
from synthetic_trials import rows, trials

from lamina.errors import UserError
from lamina.papers import judging
from lamina.papers.judging import (
    NotMeasured,
    Trials,
    equivalent,
    fails_to_train,
    higher,
    lower,
    no_worse,
    ordered,
    trains,
    values_of,
)

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


def test_a_large_difference_is_not_equivalent():
    both = trials(rows("keel", shifted(-0.1)), rows("pre_ln", BASE))
    assert equivalent(both, "keel", "pre_ln", within=0.02).verdict == "reversed"


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
    with pytest.raises(UserError, match="by: none given for 'spikes'"):
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
    assert found.note == "pre_ln: 1 of 5 diverged (share that failed: 95 % 1% to 72%)"
    assert found.ours.startswith(
        "keel vs pre_ln, runs that failed last: lower in 5 of 5 pairs, median difference -0.0195"
    )
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
    assert lower(table, "a", than="b").note == "a: 2 of 3 short (too few steps to tell)"


def test_an_arm_that_does_not_train_is_worse_than_any_that_does():
    stuck = ["stuck", "stuck", "diverged", "stuck", "stuck"]
    both = trials(rows("post_ln", [2.0] * 5, stuck), rows("pre_ln", BASE))
    found = lower(both, "pre_ln", than="post_ln")
    assert found.verdict == "holds"
    ending = "pre_ln 3.01 vs post_ln does not train (4 stuck and 1 diverged of 5)"
    assert found.ours == f"{ending} (Fisher's exact test of the shares: p 0.0079)"
    assert lower(both, "post_ln", than="pre_ln").verdict == "reversed"
    assert higher(both, "post_ln", than="pre_ln").verdict == "holds"
    assert equivalent(both, "post_ln", "pre_ln").verdict == "reversed"
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
    with pytest.raises(NotMeasured, match="keel as one arm: its trials differ in arm"):
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
    sweep = [
        {**row, "learning_rate": rate, "status": status}
        for rate, loss, status in ((1e-3, 3.2, "finished"), (2e-3, 3.1, "finished"), (4e-3, 1.0, "diverged"))
        for row in rows("keel", [loss] * 3)
    ]
    assert judging.optimum(trials(sweep), "keel").rate == 2e-3


def test_a_run_that_failed_takes_no_rate_from_the_optimum():
    ends = ((1e-3, 3.2, "finished"), (2e-3, 3.0, "finished"), (4e-3, 3.1, "finished"))
    sweep = [
        {**row, "learning_rate": rate, "status": end} for rate, loss, end in ends for row in rows("keel", [loss] * 3)
    ]
    sweep[4] |= {"status": "failed", "eval_loss": None}
    assert judging.optimum(trials(sweep), "keel").trained == 2e-3


def test_tables_of_probes_have_their_trials_in_front():
    def read(key, name, at):
        frame = pd.DataFrame({"layer": [0, 1], "value": [1.0, 2.0], "seed": [9, 9]})
        return frame if (name, at) == ("gradients", "init") and not key.endswith("-1") else None

    table = trials(rows("keel", BASE[:3]), axes=(), measures=read).measure("gradients", at="init")
    assert table.columns.tolist() == ["placement", "learning_rate", "seed", "key", "layer", "value", "gradients_seed"]
    assert table["seed"].tolist() == [0, 0, 2, 2]
    assert table.groupby("seed")["value"].sum().to_dict() == {0: 3.0, 2: 3.0}
