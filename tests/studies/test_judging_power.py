"""What the judge refuses to decide, whatever a claim's code finds."""

import pandas as pd
import pytest
from synthetic_trials import rows

from lamina.papers.judging import Finding, Trials, Verdict, fails_to_train, judge, lower
from lamina.papers.judging.claims import Claim, judgeable
from lamina.papers.judging.rates import at_best_rates

LOSSES = [3.00, 3.01, 3.02, 3.005, 3.015, 3.03]
LOWER = [loss - 0.1 - loss / 1000 for loss in LOSSES]


def table(*arms, **values):
    return pd.DataFrame([{**row, **values} for arm in arms for row in arm])


def judged(rows, check=lambda trials: lower(trials, "keel", than="pre_ln"), axes=("placement",), measures=None, **more):
    claim = Claim(name="a", says="", paper="", check=check, **more)
    (one,) = judge([claim], Trials(rows, axes=axes, measures=measures))
    return one


def both(**values):
    return table(rows("keel", LOWER), rows("pre_ln", LOSSES), **values)


def test_both_arms_must_have_learned_more_than_a_table_of_bigrams():
    assert judged(both(bigram_entropy=3.5)).verdict == "holds"
    assert judged(both(bigram_entropy=float("nan"))).verdict == "holds", "nothing is known of it"
    between = judged(both(bigram_entropy=2.95))
    assert between.verdict == "needs scale"
    assert between.note == "not past the loss of a table of bigrams (in brackets): pre_ln 3.013 (2.950)"
    assert judged(both(bigram_entropy=2.95), exact=True).verdict == "holds"


@pytest.mark.parametrize(("bigrams", "verdict"), [(2.95, "holds"), (2.5, "needs scale")])
def test_of_what_keeps_an_arm_from_learning_one_arm_past_the_bigrams_is_enough(bigrams, verdict):
    assert judged(both(bigram_entropy=bigrams), one_learned=True).verdict == verdict


def test_an_arm_that_does_not_train_needs_not_be_past_bigrams():
    stuck = table(rows("keel", LOWER), rows("pre_ln", LOSSES, "stuck"), bigram_entropy=2.95)
    assert judged(stuck).verdict == "holds"
    assert judged(stuck, lambda trials: fails_to_train(trials, "pre_ln")).verdict == "holds"


def test_models_before_training_are_under_no_rule():
    frame = pd.DataFrame({"layer": [0], "value": [1.0]})

    def check(at):
        def read(trials):
            count = len(trials.measure("states", at=at))
            return Finding(verdict=Verdict.HOLDS, ours=f"{count} rows", seeds=6)

        return read

    short = both(bigram_entropy=1.0)
    assert judged(short, check("init"), measures=lambda key, name, at: frame).verdict == "holds"
    assert judged(short, check("end"), measures=lambda key, name, at: frame).verdict == "needs scale"


def test_a_later_stage_is_as_good_as_the_models_that_it_began_with():
    after = both(stage="tasks", bigram_entropy=None, score_sorting=60.0).assign(eval_loss=0.5)
    after["key"] += "-tasks"
    first = both(stage="pretrain", bigram_entropy=2.95, score_sorting=None)
    whole = pd.concat([first, after], ignore_index=True)

    def check(trials):
        return lower(trials.where(stage="tasks"), "keel", than="pre_ln", column="score_sorting", by=1.0)

    found = judged(whole, check, axes=("placement", "stage"))
    assert "pre_ln 3.013 (2.950)" in found.note
    assert found.verdict == "needs scale"


@pytest.mark.parametrize(("low", "verdict"), [(24.0, "needs scale"), (40.0, "holds")])
def test_both_arms_must_be_above_chance_on_the_tasks(low, verdict):
    scores = table(
        [{**row, "score_sorting": low + 0.1 * i} for i, row in enumerate(rows("keel", LOWER))],
        [{**row, "score_sorting": 60 + 0.2 * i} for i, row in enumerate(rows("pre_ln", LOSSES))],
    )
    found = judged(scores, lambda trials: lower(trials, "keel", than="pre_ln", column="score_sorting", by=1.0))
    assert found.verdict == verdict
    assert ("keel is not above chance: score_sorting from 24.1 % (95 %), chance 25.0 %" in found.note) == (low < 25)


def test_both_policies_must_have_moved():
    moved = both(eval_reward=1.0).assign(reward_gain=[0.5, 0.6, 0.4, 0.5, 0.55, 0.45, 0.1, -0.2, 0.2, -0.1, 0.0, 0.1])
    found = judged(moved)
    assert found.verdict == "needs scale"
    assert "pre_ln: the policy has not moved" in found.note
    assert "keel" not in found.note


def test_a_rate_that_the_tested_seeds_chose_decides_nothing():
    rows_of = both(tuned_on=True)
    found = judged(rows_of)
    assert (found.verdict, found.note) == ("inconclusive", "its rates were chosen by seeds that it tests")
    swept = judged(both(), lambda trials: lower(at_best_rates(trials), "keel", than="pre_ln"))
    assert (swept.verdict, swept.note) == ("inconclusive", "its rates were chosen by seeds that it tests")


def test_a_best_rate_at_the_sweeps_edge_decides_nothing():
    edge = both().assign(at_edge=lambda table: table["placement"] == "keel")
    found = judged(edge)
    assert (found.verdict, found.note) == ("inconclusive", "the best rate is at the sweep's edge: keel")


def test_the_seeds_of_the_sweep_are_left_out_where_five_others_remain():
    rows_of = both()
    kept = judgeable(rows_of, ["placement"], (0,), range(6))
    assert sorted(set(kept["seed"])) == [1, 2, 3, 4, 5]
    few = judgeable(rows_of, ["placement"], (0, 1), range(6))
    assert sorted(set(few["seed"])) == [0, 1, 2, 3, 4, 5]
    assert sorted(set(few.loc[few["tuned_on"], "seed"])) == [0, 1]
    apart = judgeable(rows_of, ["placement"], (100, 101), range(6))
    assert len(apart) == len(rows_of)


def test_arms_that_were_tried_at_unequal_numbers_of_rates_are_noted():
    found = judged(both().assign(rates=lambda table: table["placement"].map({"keel": 7, "pre_ln": 5})))
    assert (found.verdict, found.note) == ("holds", "arms were tuned over unequal numbers of rates: 5, 7")
