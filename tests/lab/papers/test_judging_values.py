"""Checks of numbers by seed, and verdicts at equal loss and at equal KL, against tables made by hand."""

import math
import random

import pandas as pd
import pytest
from lab.papers.synthetic_trials import rows, trials
from scipy import stats

from lamina.lab.papers.judging import (
    Budget,
    Finding,
    Trials,
    Verdict,
    above,
    all_of,
    any_of,
    at_equal_kl,
    at_loss,
    below,
    better_at_equal_loss,
    close,
    compare_values,
    denied,
    equivalent_values,
    fraction,
    frontiers,
    iso_loss,
    judge,
    monotone,
    needs_scale,
    same_order,
)
from lamina.lab.papers.judging.claims import Claim
from lamina.lab.papers.judging.curves import numbers

VALUES = {0: 0.101, 1: 0.099, 2: 0.102, 3: 0.1, 4: 0.098}


def raised(by):
    return {seed: value + by + 0.001 * (seed % 2) for seed, value in VALUES.items()}


def test_values_are_paired_by_seed():
    assert compare_values(VALUES, raised(0.05), by=0.01).verdict == "holds"
    assert compare_values(VALUES, raised(0.05), by=0.01, lower=False).verdict == "reversed"
    assert compare_values({**VALUES, 5: 100.0}, raised(0.05), by=0.01).seeds == 5
    assert equivalent_values(VALUES, raised(0.0), within=0.01).verdict == "holds"


def test_bounds():
    assert below(VALUES, 0.2).verdict == above(VALUES, 0.05).verdict == "holds"
    assert below(VALUES, 0.05).verdict == above(VALUES, 0.2).verdict == "reversed"
    assert below(VALUES, 0.1005).verdict == "inconclusive"
    assert below({0: 0.1, 1: 0.1}, 0.2).verdict == "inconclusive"
    found = below(VALUES, 0.2, name="angle")  # the bound itself is tested, and not 0
    assert found.ours.startswith("angle 0.1 (95 % 0.09")
    assert found.interval[0] < found.margin < found.interval[1] < 0.2
    assert found.p == pytest.approx(2 * stats.ttest_1samp(list(VALUES.values()), 0.2, alternative="less").pvalue)


def test_an_exact_formula_allows_no_seed_to_miss_it():
    assert close(VALUES, 0.1, 0.03).verdict == "holds"
    assert close(VALUES, 0.1, 0.01).verdict == "fails"
    assert close(float("nan"), 0.1, 0.01).verdict == "fails"
    assert close(2.0**-64, 2.0**-64, 1e-6).verdict == "holds"


def test_a_trend_needs_its_direction_and_more_than_the_seeds_spread():
    rising = {x: {seed: x + 0.1 * seed * x for seed in range(5)} for x in (8, 16, 32)}
    found = monotone(rising, name="gain")
    slopes = [(32 - 8) / 2 * (1 + 0.1 * seed) for seed in range(5)]  # of values at the ranks 0, 1, 2
    assert (found.verdict, found.margin) == ("holds", 1.0)
    assert found.p == pytest.approx(stats.ttest_1samp(slopes, 0).pvalue)
    assert found.ours == "gain 9.6, 19.2, 38.4 at 8, 16, 32: rising with tau 1.00 (5 seeds, p < 0.001)"
    assert monotone(rising, rising=False).verdict == "reversed"
    falling = {x: {seed: -value for seed, value in values.items()} for x, values in rising.items()}
    assert monotone(falling, rising=False).verdict == "holds"
    mixed = {x: {seed: x * (1 if seed else -1) for seed in range(5)} for x in (8, 16, 32)}
    assert monotone(mixed).verdict == "inconclusive"
    assert monotone({1: {0: 1.0}, 2: {1: 2.0}}).verdict == "inconclusive"


def test_a_seed_whose_value_is_not_finite_has_no_trend():
    steep = {x: {seed: x + 0.01 * seed for seed in range(4)} for x in (1.0, 2.0, 3.0, 4.0)}
    whole, steep[2.0][4] = monotone(steep), math.nan
    for x in (1.0, 3.0, 4.0):
        steep[x][4] = 0.0
    assert monotone(steep) == whole


def test_two_rankings():
    a = ranking("abcdef")
    assert same_order(a, {**a, "z": by_seeds(9)}).verdict == "holds"
    assert same_order(a, ranking("fedcba")).verdict == "reversed"
    assert same_order(a, ranking("fedcba")).seeds == 5
    short = ranking("abc")
    assert same_order(short, short).verdict == "inconclusive"
    for few in (ranking("a"), ranking("ab"), {}):
        assert same_order(few, a).verdict == "inconclusive", "too few arms deny nothing"
    assert denied(same_order(ranking("a"), a)).verdict == "inconclusive"
    assert same_order(a, {arm: {0: values[0], 1: values[1]} for arm, values in a.items()}).verdict == "inconclusive"


def test_rankings_inside_the_spread_over_seeds_are_not_different():
    """The same true order at both sizes, with gaps far below the spread: tau is low by chance."""
    draw = random.Random(3)
    a, b = ({arm: by_seeds(0.01 * place, draw, 0.1) for place, arm in enumerate("abcdef")} for _ in range(2))
    found = same_order(a, b)
    assert found.margin < 0.6
    assert found.verdict == "inconclusive"


def test_an_arm_that_never_trains_ranks_last():
    a = ranking("abcdef")
    assert same_order(a, {**a, "f": {}}).margin == pytest.approx(1.0)
    assert same_order(a, {**a, "a": {}}).margin < 0.5


def by_seeds(center, draw=None, spread=0.0):
    return {seed: center + (draw.gauss(0, spread) if draw else 0.0) for seed in range(5)}


def ranking(arms):
    return {arm: by_seeds(float(place)) for place, arm in enumerate(arms)}


def test_noise_neither_rises_nor_fails_to():
    draw = random.Random(1)
    verdicts = [monotone({x: by_seeds(0.0, draw, 1.0) for x in (1.0, 2.0, 3.0, 4.0)}).verdict for _ in range(60)]
    assert verdicts.count("inconclusive") > 50


def test_equal_differences_of_counts_are_as_sure_as_their_number():
    """Not as an exact formula: 1 against 0 in each of three seeds is no proof."""
    for count, verdict in ((3, "inconclusive"), (5, "inconclusive"), (6, "holds")):
        none, one = dict.fromkeys(range(count), 0.0), dict.fromkeys(range(count), 1.0)
        found = compare_values(none, one, by=0.1)
        assert found.p == pytest.approx(2.0 ** (1 - count))
        assert found.verdict == verdict


def test_a_share_of_cases():
    assert fraction([True] * 9 + [False], at_least=0.9, name="layers").ours == "layers 9 of 10 (claimed: at least 90%)"
    assert fraction([True, False, True], at_least=0.9).verdict == "fails"
    for few in ([], [True, True]):
        assert fraction(few, at_least=0.9).verdict == "inconclusive", "these are too few"


def finding(verdict, p=None, ours="", seeds=5, margin=None, note=""):
    return Finding(verdict=Verdict(verdict), ours=ours or verdict, p=p, seeds=seeds, margin=margin, note=note)


def test_all_of_is_as_strong_as_its_weakest_part():
    both = all_of(finding("holds", 0.01, margin=1.0), finding("holds", 0.04, "b", seeds=3, margin=2.0))
    assert (both.verdict, both.p, both.margin, both.seeds) == ("holds", 0.04, 2.0, 3)
    assert both.ours == "holds: b; holds: holds"
    assert all_of(finding("holds"), finding("inconclusive"), finding("fails")).verdict == "a part failed"
    nested = all_of(both, finding("fails", ours="c"))
    # what decides comes first, and each finding stays a line of its own
    assert nested.parts == ("fails: c", "holds: b", "holds: holds")
    assert all_of(finding("holds"), finding("inconclusive")).verdict == "inconclusive"
    assert all_of(finding("holds"), needs_scale("gpu", "too shallow here")).verdict == "needs scale"


def test_any_of_pays_for_its_parts():
    either = any_of(finding("fails", 0.5), finding("holds", 0.01))
    assert (either.verdict, either.p) == ("holds", 0.02)
    wrong = any_of(finding("fails", 0.00001), finding("holds", 0.02))
    assert wrong.p == 0.04, "what fails significantly does not prove what holds"
    assert any_of(finding("fails"), finding("inconclusive")).verdict == "inconclusive"
    assert any_of(finding("fails"), finding("fails")).verdict == "fails"


def test_a_denied_claim_is_the_opposite_one():
    opposite = denied(finding("holds", 0.01))
    assert (opposite.verdict, opposite.p, opposite.p_not) == ("reversed", None, 0.01)
    assert denied(finding("fails")).verdict == "holds"
    assert denied(finding("inconclusive")).verdict == "inconclusive"


def test_a_note_that_two_parts_have_is_said_once():
    first, second = (Finding(verdict=Verdict.HOLDS, ours=ours, p=0.01) for ours in ("a", "b"))
    whole = all_of(first.noted("a: 1 of 7 stuck"), second.noted("a: 1 of 7 stuck").noted("b: 7 of 7 short"))
    assert whole.note == "a: 1 of 7 stuck; b: 7 of 7 short"


@pytest.mark.parametrize(
    ("statuses", "seeds"), [(["short"] * 4 + ["finished"] * 2, 0), (["short"] * 3 + ["finished"] * 3, 6), ("stuck", 0)]
)
def test_the_layers_of_an_arm_that_has_not_learned_are_not_compared(statuses, seeds):
    table = pd.DataFrame({"layer": [0, 1], "metric": "x", "value": [1.0, 2.0]})
    arms = rows("hybridnorm", [3.0] * 6, statuses), rows("fusenorm", [2.0] * 6)
    both = trials(*arms, measures=lambda key, name, at: table)
    at_end, at_start = (
        [numbers(both, arm, "spectra", lambda table: table["value"].sum(), at=at) for arm in ("fusenorm", "hybridnorm")]
        for at in ("end", "init")
    )
    assert [len(values) for values in at_end] == [6, seeds]
    assert [len(values) for values in at_start] == [6, 6]
    if not seeds:
        found = compare_values(*at_end, by=0.1, names=("rank: fusenorm", "rank: hybridnorm"))
        assert found.verdict == "inconclusive"
        assert found.note == "fewer than 3 pairs of seeds; no run has learned: hybridnorm"


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
    assert "cannot tell" in finding.note
    assert finding.p == 0.01


@pytest.mark.parametrize("scores", [(30.0, 40.0, 42.0), (30.0, 30.0, 30.0)])
def test_a_difference_that_is_not_there_needs_no_explanation(scores):
    assert control(scores).verdict in (Verdict.REVERSED, Verdict.EXCLUDED, Verdict.INCONCLUSIVE)


def test_the_value_at_a_loss_is_on_the_line_between_two_budgets():
    first = Budget(losses=dict.fromkeys(range(3), 2.0), values=dict.fromkeys(range(3), 10.0))
    budgets = [first, Budget(losses={0: 1.0, 1: 1.0}, values={0: 30.0, 1: 30.0})]
    # seed 0 between, seed 1 above both: the value at the highest; seed 2 below all; seed 3 not trained
    assert at_loss(budgets, {0: 1.25, 1: 2.5, 2: 1.5, 3: 1.0}) == {0: 25.0, 1: 10.0}


def test_seeds_that_cannot_be_matched_are_counted():
    finding = control((40.0, 30.0, 32.0), losses=(1.5, 2.2, 1.8))
    assert finding.verdict == Verdict.HOLDS
    assert "the comparison at equal loss leaves out 6 seeds: no pre_ln 1x run has such a low loss" in finding.note
    raw, ours = compare_values({}, {}, lower=False, by=0.1, names=("a", "b")), {0: 1.0, 1: 1.0, 2: 1.0}
    other = Budget(losses={0: 1.0, 1: 1.0, 2: 1.0}, values={0: 1.0, 1: 1.0})
    found = iso_loss(raw, Budget(losses=ours, values={1: 1.0, 2: 1.0}), [other], by=0.0, names=("a", "b"))
    assert "at equal loss leaves out 1 seed: no b run" in found.note, (
        "seed 0 is matched and has no value of ours; seed 2 is not matched"
    )


def test_holms_correction_holds_for_the_controlled_verdicts_too():
    def check(trials):
        return Finding(verdict=Verdict.HOLDS_AT_ISO_LOSS, ours="x", p=0.03, seeds=6)

    claims = [Claim(name=f"c/{i}", says="x", paper="", check=check) for i in range(2)]
    assert [one.verdict for one in judge(claims, table((1.0, 2.0, 3.0)))] == [Verdict.INCONCLUSIVE] * 2


def test_the_weakest_of_several_decides_and_the_strongest_of_alternatives():
    found = {Verdict.HOLDS_AT_ISO_LOSS: 0.015, Verdict.HOLDS: 0.01, Verdict.EXPLAINED: 0.02}
    one, two, three = (Finding(verdict=v, ours=str(v), p=p) for v, p in found.items())
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
    tables = {"a": held_out([(0.0, 1.0), (2.0, 3.0), (4.0, 4.0)]), "b": held_out([(0.0, 1.0), (1.0, 1.5), (3.0, 3.5)])}
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


def test_the_smallest_difference_may_be_a_share_of_the_quantity():
    base = {seed: 0.04 + 0.0002 * seed for seed in range(8)}
    wider = {seed: 1.2 * value for seed, value in base.items()}
    assert compare_values(wider, base, by=0.01, lower=False).verdict == "excluded"  # a quarter of the quantity
    assert compare_values(wider, base, share=0.1, lower=False).verdict == "holds"
    assert compare_values(wider, base, share=0.3, lower=False).verdict == "excluded"
