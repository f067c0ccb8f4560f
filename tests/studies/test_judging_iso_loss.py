"""Verdicts at equal loss and at equal KL, against tables that were made by hand."""

import pandas as pd
import pytest

from lamina.papers.judging import (
    Budget,
    Finding,
    Trials,
    Verdict,
    all_of,
    any_of,
    at_equal_kl,
    at_loss,
    better_at_equal_loss,
    denied,
    frontiers,
    iso_loss,
    judge,
)
from lamina.papers.judging.claims import Claim
from lamina.papers.judging.value_checks import compare_values

SEEDS = range(6)
NOISE = [0.1, -0.2, 0.05, 0.15, -0.1, 0.0]
MIX, PRE, LONG = ({"placement": p, "budget": b} for p, b in (("mix_ln", "1x"), ("pre_ln", "1x"), ("pre_ln", "2x")))


def table(scores, losses=(2.0, 2.2, 1.8)):
    """Rows of two stages: by arm a loss after pretraining and a score after tuning, with noise over the seeds."""
    rows = []
    for arm, score, loss in zip((MIX, PRE, LONG), scores, losses, strict=True):
        for seed in SEEDS:
            own = {**arm, "seed": seed, "status": "finished", "tuned": True, "learning_rate": 1e-2}
            rows.append({**own, "stage": "pretrain", "eval_loss": loss + 0.01 * seed, "key": f"p{len(rows)}"})
            jitter = NOISE[seed] * (1 if arm is MIX else -0.5)
            rows.append({**own, "stage": "tasks", "score": score + jitter, "key": f"t{len(rows)}"})
    return Trials(pd.DataFrame(rows), axes=["placement", "budget", "stage"])


def control(scores, **changed):
    return better_at_equal_loss(table(scores, **changed), MIX, than=PRE, longer=[LONG], stage="tasks")


def test_a_better_arm_holds_at_equal_loss_where_longer_training_does_not_reach_it():
    finding = control((40.0, 30.0, 32.0))  # at a loss of 2.0 Pre-LN is halfway: 31
    assert finding.verdict == Verdict.HOLDS_AT_ISO_LOSS
    assert finding.margin == pytest.approx(9.0, abs=0.1)
    assert finding.seeds == 6
    assert "pre_ln 1x at equal loss" in finding.ours


def test_a_better_arm_is_explained_by_its_loss_where_longer_training_gives_as_much():
    finding = control((40.0, 30.0, 50.0))  # halfway: 40
    assert finding.verdict == Verdict.EXPLAINED
    assert finding.margin == pytest.approx(0.0, abs=0.1)
    assert finding.p < 1e-3  # of the difference at equal steps, which is there


def test_an_open_control_leaves_what_was_found_and_says_so():
    values = {0: 41.0, 1: 39.0, 2: 44.0, 3: 38.0, 4: 43.0}
    ours = Budget(losses=dict.fromkeys(values, 2.0), values=values)
    other = Budget(losses=dict.fromkeys(values, 2.0), values=dict.fromkeys(values, 39.5))
    raw = Finding(verdict=Verdict.HOLDS, ours="better", p=0.01, seeds=5)
    finding = iso_loss(raw, ours, [other], by=1.0, names=("mix", "pre"))
    assert finding.verdict == Verdict.HOLDS
    assert "is open" in finding.note
    assert finding.p == 0.01


@pytest.mark.parametrize("scores", [(30.0, 40.0, 42.0), (30.0, 30.0, 30.0)])
def test_a_difference_that_is_not_there_needs_no_explanation(scores):
    assert control(scores).verdict in (Verdict.REVERSED, Verdict.EXCLUDED, Verdict.INCONCLUSIVE)


def test_the_value_at_a_loss_is_on_the_line_between_two_budgets():
    budgets = [
        Budget(losses={0: 2.0, 1: 2.0, 2: 2.0}, values={0: 10.0, 1: 10.0, 2: 10.0}),
        Budget(losses={0: 1.0, 1: 1.0}, values={0: 30.0, 1: 30.0}),
    ]
    # seed 0 between, seed 1 above both: the value at the highest; seed 2 below all; seed 3 not trained
    assert at_loss(budgets, {0: 1.25, 1: 2.5, 2: 1.5, 3: 1.0}) == {0: 25.0, 1: 10.0}


def test_seeds_that_cannot_be_matched_are_counted():
    finding = control((40.0, 30.0, 32.0), losses=(1.5, 2.2, 1.8))
    assert finding.verdict == Verdict.HOLDS
    assert "6 without a pre_ln 1x run of so low a loss" in finding.note
    raw, ours = compare_values({}, {}, lower=False, by=0.1, names=("a", "b")), {0: 1.0, 1: 1.0, 2: 1.0}
    other = Budget(losses={0: 1.0, 1: 1.0, 2: 1.0}, values={0: 1.0, 1: 1.0})
    found = iso_loss(raw, Budget(losses=ours, values={1: 1.0, 2: 1.0}), [other], by=0.0, names=("a", "b"))
    assert "1 without a b run" in found.note, "seed 0 is matched and has no value of ours; seed 2 is not matched"


def test_holms_correction_holds_for_the_controlled_verdicts_too():
    def check(trials):
        return Finding(verdict=Verdict.HOLDS_AT_ISO_LOSS, ours="x", p=0.03, seeds=6)

    claims = [Claim(name=f"c/{i}", says="x", paper="", check=check) for i in range(2)]
    assert [one.verdict for one in judge(claims, table((1.0, 2.0, 3.0)))] == [Verdict.INCONCLUSIVE] * 2


def test_the_weakest_of_several_decides_and_the_strongest_of_alternatives():
    one, two, three = (
        Finding(verdict=v, ours=str(v), p=p)
        for v, p in ((Verdict.HOLDS_AT_ISO_LOSS, 0.015), (Verdict.HOLDS, 0.01), (Verdict.EXPLAINED, 0.02))
    )
    assert all_of(one, two).verdict == Verdict.HOLDS
    assert all_of(one, two, three).verdict == Verdict.EXPLAINED
    assert all_of(one, one).verdict == Verdict.HOLDS_AT_ISO_LOSS
    assert any_of(three, one, two).verdict == Verdict.HOLDS_AT_ISO_LOSS
    assert denied(three).verdict == Verdict.REVERSED
    assert all(one.verdict.decided and one.verdict.shown for one in (one, two, three))


def held_out(points):
    """held_out.jsonl of two prompts whose mean KL and reward are these, by step."""
    rows = []
    for step, (kl, reward) in enumerate(points):
        rows += [{"step": step, "prompt": i, "kl": kl + d, "reward": reward - d} for i, d in ((0, -0.5), (1, 0.5))]
    return pd.DataFrame(rows)


def policies():
    tables = {
        "a": held_out([(0.0, 1.0), (2.0, 3.0), (4.0, 4.0)]),
        "b": held_out([(0.0, 1.0), (1.0, 1.5), (3.0, 3.5)]),
    }
    rows = [{"placement": p, "seed": 0, "status": "finished", "key": p} for p in tables]
    return Trials(
        pd.DataFrame(rows), axes=["placement"], measures=lambda key, name, at: tables[key] if at == "records" else None
    )


def test_rewards_are_compared_at_the_largest_kl_that_both_policies_reached():
    found = {name: frontiers(policies(), name) for name in ("a", "b")}
    assert list(found["a"][0]) == [(0.0, 1.0), (2.0, 3.0), (4.0, 4.0)]
    rewards, reached = at_equal_kl(found)
    assert reached == {0: 3.0}
    assert rewards == {"a": {0: 3.5}, "b": {0: 3.5}}


def test_a_policy_that_diverged_has_no_frontier():
    trials = policies()
    trials.table.loc[trials.table["placement"] == "b", "status"] = "diverged"
    assert frontiers(trials, "b") == {}
    assert at_equal_kl({"a": frontiers(trials, "a"), "b": {}}) == ({"a": {}, "b": {}}, {})
