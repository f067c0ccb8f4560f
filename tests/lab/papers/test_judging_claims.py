"""Claims and their judge: rules of power, corrections, and how often it is wrong on simulated trials."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from lab.papers.synthetic_trials import rows, trials
from scipy import stats
from spread import spread

from lamina.errors import UserError
from lamina.lab.papers.engine.verdicts import _reader
from lamina.lab.papers.judging import (
    Finding,
    Trials,
    Verdict,
    claims,
    compare_values,
    fails_to_train,
    judge,
    load_claims,
    lower,
    needs_scale,
    ordered,
)
from lamina.lab.papers.judging.claims import Claim, judgeable
from lamina.lab.papers.judging.findings import in_words
from lamina.lab.papers.judging.rates import at_best_rates
from lamina.lab.papers.study_catalog import Scale

CLAIMS = '''
"""Mix-LN Table 1."""
from lamina.lab.papers.judging import Finding, Trials, claim, fails_to_train, lower

@claim(says="Mix-LN's loss is below Pre-LN's", paper="21.39 < 21.92")
def mix_ppl(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")

@claim(says="Post-LN does not train")
def mix_ppl__post_fails(trials: Trials) -> Finding:
    return fails_to_train(trials, "post_ln")
'''
BASE = [3.000, 3.010, 3.020, 3.005, 3.015]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")

    def write(text, name="mix-ppl.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_claims_of_a_file_are_judged_and_recorded(file):
    claims = load_claims(file(CLAIMS))
    assert [each.name for each in claims] == ["mix-ppl", "mix-ppl/post-fails"]
    three = trials(
        rows("mix_ln", [loss - 0.02 - loss / 1000 for loss in BASE]), rows("pre_ln", BASE),
        rows("post_ln", BASE, "stuck"),
    )  # fmt: skip
    records = [judged.record() for judged in judge(claims, three)]
    assert [record["verdict"] for record in records] == ["holds", "holds"]
    assert list(records[0]) == [
        "claim", "says", "verdict", "ours", "parts", "paper", "margin", "interval", "p", "p_holm", "seeds", "note",
    ]  # fmt: skip
    assert json.loads(json.dumps(records, allow_nan=False))[0]["paper"] == "21.39 < 21.92"


def holding(p):
    return lambda trials: Finding(verdict=Verdict.HOLDS, ours="", p=p, seeds=5)


def failing(p):
    return lambda trials: Finding(verdict=Verdict.REVERSED, ours="", p=1.0, p_not=p, seeds=5)


def judged(*checks, looks=1):
    claims = [Claim(name=f"a/{i}", says="", paper="", check=check) for i, check in enumerate(checks)]
    return judge(claims, trials(rows("pre_ln", BASE)), looks=looks)


def test_holms_correction_is_over_all_claims_those_without_a_test_too():
    found = judged(holding(0.01), holding(0.04), holding(None), holding(0.03))
    assert [each.p_holm for each in found] == [pytest.approx(0.04), pytest.approx(0.09), None, pytest.approx(0.09)]
    assert [each.verdict for each in found] == ["holds", "inconclusive", "holds", "inconclusive"]
    assert found[1].note == (
        "the verdict is \"supported\" only before Holm's correction for the study's claims: p is 0.04 before the "
        "correction, and 0.09 after it"
    )


def test_a_claim_that_leaves_the_tests_makes_no_other_hold():
    """Mix-drop's layers: the same trials gave `holds` when other claims had become untestable."""
    tested, untested = judged(holding(0.03), holding(0.2)), judged(holding(0.03), lambda trials: needs_scale("gpu", ""))
    assert tested[0].verdict == untested[0].verdict == "inconclusive"
    assert untested[0].p_holm == pytest.approx(0.06)


@pytest.mark.parametrize("check", [holding, failing])
def test_what_fails_is_corrected_as_what_holds(check):
    found = judged(check(0.005), check(0.02), check(0.9), looks=2)
    assert [each.p_holm for each in found] == [pytest.approx(0.03), pytest.approx(0.08), 1.0]
    word = "holds" if check is holding else "reversed"
    assert [each.verdict for each in found] == [word, "inconclusive", "inconclusive"]
    over = "the study's claims and 2 judgments"
    assert found[0].note == f"seeds were added after a judgment, so p is corrected for {over}: 0.03"
    said = f'the verdict is "{in_words(word)}" only before Holm\'s correction for {over}: p is 0.02 before'
    assert said in found[1].note


def test_a_claim_over_something_not_measured_is_one_line(file):
    one = trials(rows("pre_ln", BASE))
    with pytest.raises(UserError, match=r"^claim 'mix-ppl': the study does not measure the arm 'mix_ln' .*Add it.*\Z"):
        judge(load_claims(file(CLAIMS)), one)
    text = CLAIMS.replace('lower(trials.tuned(), "mix_ln", than="pre_ln")', 'trials.measure("angular_distance")')
    with pytest.raises(UserError, match="claim 'mix-ppl': the study does not measure angular_distance at end"):
        judge(load_claims(file(text)), one)


def test_a_claim_that_cannot_be_judged_takes_no_verdict_from_the_others(caplog):
    def wrong(trials):
        raise ValueError("no layer")

    checks = {"a": holding(0.01), "a/wrong": wrong, "a/missing": lambda trials: lower(trials, "keel", than="pre_ln")}
    claims = [Claim(name=name, says="", paper="", check=check) for name, check in checks.items()]
    first, second, third = judge(claims, trials(rows("pre_ln", BASE)))
    assert first.verdict == "holds"
    assert first.p_holm == pytest.approx(0.03), "a claim that could not be tested stays in the family"
    assert second.verdict == third.verdict == "inconclusive"
    assert "a/wrong" in second.note
    assert "ValueError" in second.note
    assert "does not measure the arm 'keel'" in third.note
    assert [record.message for record in caplog.records] == [second.note, third.note]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return lower", "1 / 0; return lower", "claim 'mix-ppl': its code raised ZeroDivisionError"),
        ("return lower", "lower", "claim 'mix-ppl': its code returned None"),
    ],
)
def test_what_a_claims_code_does_wrong_names_the_claim(file, old, new, said):
    both = trials(rows("mix_ln", BASE), rows("pre_ln", BASE))
    with pytest.raises(UserError, match=said):
        judge(load_claims(file(CLAIMS.replace(old, new))), both)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mix_ppl(", "mix_alpha(", "'mix-alpha' is not a claim of the study 'mix-ppl'"),
        ("mix_ppl__post_fails", "mix_ppl", "'mix-ppl': defined twice"),
        ("import Finding", "import Findings", "raised ImportError"),
    ],
)
def test_a_claims_file_that_is_wrong_is_named(file, old, new, said):
    with pytest.raises(UserError, match=said):
        load_claims(file(CLAIMS.replace(old, new)))
    with pytest.raises(UserError, match="no such file"):
        load_claims(file(CLAIMS).with_name("mine.py"))


def test_a_users_file_runs_with_a_warning_and_the_packages_own_without(file, caplog):
    load_claims(file(CLAIMS), trusted=True)
    assert not caplog.records
    load_claims(file(CLAIMS))
    assert "runs as code" in caplog.text


def test_a_claim_names_a_probe_with_or_without_its_options():
    measures = {"end": ("layer_drop(meaning=remove)", "gains"), "records": ("metrics",)}
    read = _reader(Scale(name="cpu", measures=measures), SimpleNamespace(table=lambda key, measure: (key, measure)))
    assert read("a", "layer_drop", "end") == read("a", "layer_drop(meaning=remove)", "end")
    assert read("a", "layer_drop", "end") == ("a", "end/layer_drop(meaning=remove)")
    assert read("a", "metrics", "records") == ("a", "records/metrics")
    assert read("a", "gains", "init") is None


LOSSES = [3.00, 3.01, 3.02, 3.005, 3.015, 3.03]
LOWER = [loss - 0.1 - loss / 1000 for loss in LOSSES]


def table(*arms, **values):
    return pd.DataFrame([{**row, **values} for arm in arms for row in arm])


def verdict(
    rows, check=lambda trials: lower(trials, "keel", than="pre_ln"), axes=("placement",), measures=None, **more
):
    claim = Claim(name="a", says="", paper="", check=check, **more)
    (one,) = judge([claim], Trials(rows, axes=axes, measures=measures))
    return one


def both(**values):
    return table(rows("keel", LOWER), rows("pre_ln", LOSSES), **values)


def test_both_arms_must_have_learned_more_than_a_table_of_bigrams():
    assert verdict(both(bigram_entropy=3.5)).verdict == "holds"
    assert verdict(both(bigram_entropy=float("nan"))).verdict == "holds", "nothing is known of it"
    between = verdict(both(bigram_entropy=2.95))
    assert between.verdict == "needs scale"
    assert between.note == "the loss is above the loss of a bigram table (2.950) in these settings: pre_ln (3.013)"
    assert verdict(both(bigram_entropy=2.95), exact=True).verdict == "holds"


@pytest.mark.parametrize(("bigrams", "word"), [(2.95, "holds"), (2.5, "needs scale")])
def test_of_what_keeps_an_arm_from_learning_one_arm_past_the_bigrams_is_enough(bigrams, word):
    assert verdict(both(bigram_entropy=bigrams), one_learned=True).verdict == word


def test_an_arm_that_does_not_train_needs_not_be_past_bigrams():
    stuck = table(rows("keel", LOWER), rows("pre_ln", LOSSES, "stuck"), bigram_entropy=2.95)
    assert verdict(stuck).verdict == "holds"
    assert verdict(stuck, lambda trials: fails_to_train(trials, "pre_ln")).verdict == "holds"


def test_models_before_training_are_under_no_rule():
    frame = pd.DataFrame({"layer": [0], "value": [1.0]})

    def check(at):
        def read(trials):
            count = len(trials.measure("states", at=at))
            return Finding(verdict=Verdict.HOLDS, ours=f"{count} rows", seeds=6)

        return read

    short = both(bigram_entropy=1.0)
    assert verdict(short, check("init"), measures=lambda key, name, at: frame).verdict == "holds"
    assert verdict(short, check("end"), measures=lambda key, name, at: frame).verdict == "needs scale"


def test_a_later_stage_is_as_good_as_the_models_that_it_began_with():
    after = both(stage="tasks", bigram_entropy=None, score_sorting=60.0).assign(eval_loss=0.5)
    after["key"] += "-tasks"
    first = both(stage="pretrain", bigram_entropy=2.95, score_sorting=None)
    whole = pd.concat([first, after], ignore_index=True)

    def check(trials):
        return lower(trials.where(stage="tasks"), "keel", than="pre_ln", column="score_sorting", by=1.0)

    found = verdict(whole, check, axes=("placement", "stage"))
    assert "the loss is above the loss of a bigram table (2.950)" in found.note
    assert "pre_ln (3.013)" in found.note
    assert found.verdict == "needs scale"


@pytest.mark.parametrize(("low", "word"), [(24.0, "needs scale"), (40.0, "holds")])
def test_both_arms_must_be_above_chance_on_the_tasks(low, word):
    scores = table(
        [{**row, "score_sorting": low + 0.1 * i} for i, row in enumerate(rows("keel", LOWER))],
        [{**row, "score_sorting": 60 + 0.2 * i} for i, row in enumerate(rows("pre_ln", LOSSES))],
    )
    found = verdict(scores, lambda trials: lower(trials, "keel", than="pre_ln", column="score_sorting", by=1.0))
    assert found.verdict == word
    said = "score_sorting is not clearly above chance (25.0 %). The 95 % interval starts at: keel (24.1 %)"
    assert (said in found.note) == (low < 25)


def test_both_policies_must_have_moved():
    moved = both(eval_reward=1.0).assign(reward_gain=[0.5, 0.6, 0.4, 0.5, 0.55, 0.45, 0.1, -0.2, 0.2, -0.1, 0.0, 0.1])
    found = verdict(moved)
    assert found.verdict == "needs scale"
    assert "in the setting pre_ln, the reward has not clearly risen" in found.note
    assert "keel" not in found.note


def test_a_rate_that_the_tested_seeds_chose_decides_nothing():
    found = verdict(both(tuned_on=True))
    swept = verdict(both(), lambda trials: lower(at_best_rates(trials), "keel", than="pre_ln"))
    note = "the learning rates were chosen on the seeds that the test compares"
    assert (found.verdict, found.note) == (swept.verdict, swept.note) == ("inconclusive", note)


def test_a_best_rate_at_the_sweeps_edge_decides_nothing():
    found = verdict(both().assign(at_edge=lambda table: table["placement"] == "keel"))
    note = "the best learning rate is the lowest or highest of the sweep in these settings: keel"
    assert (found.verdict, found.note) == ("inconclusive", note)


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
    found = verdict(both().assign(rates=lambda table: table["placement"].map({"keel": 7, "pre_ln": 5})))
    note = "settings were tuned over different numbers of learning rates: 5, 7"
    assert (found.verdict, found.note) == ("holds", note)


ARMS = ("one", "two", "three")
WRONG = ("holds", "reversed", "a part failed")  # "excluded" is right: there is no difference
SPREAD = 0.1  # of a loss over the seeds, half of it shared by the arms of a seed
SIMULATED = [
    Claim(name="x", says="", paper="", check=lambda trials: lower(trials.tuned(), "one", than="two")),
    Claim(name="x/b", says="", paper="", check=lambda trials: lower(trials.tuned(), "three", than="two")),
    Claim(name="x/c", says="", paper="", check=lambda trials: ordered(trials.tuned(), ARMS)),
]


def simulated(random, seeds, *, effect=0.0, stuck=0.0, rates=(1e-3,), key=""):
    """Runs of three arms that differ in nothing, or the first by an effect; each gets stuck with the same chance."""
    shared, rows = {seed: random.normal(0, SPREAD) for seed in seeds}, []
    for arm in ARMS:
        for rate in rates:
            for seed in seeds:
                loss = 2.0 + shared[seed] + random.normal(0, SPREAD) + (effect if arm == "one" else 0.0)
                status = "stuck" if random.random() < stuck else "finished"
                name = f"{arm}/{rate}/{seed}{key}"
                rows.append((arm, rate, seed, loss, status, True, name))
    columns = ["placement", "learning_rate", "seed", "eval_loss", "status", "tuned", "key"]
    return pd.DataFrame(rows, columns=columns)


def verdicts(rows, looks=1, claims=SIMULATED):
    return [one.verdict for one in judge(claims, Trials(rows, axes=("placement",)), looks=looks)]


def plain(random, seeds=8):
    return verdicts(simulated(random, range(seeds)))


def stuck(random, share=0.3, seeds=8):
    return verdicts(simulated(random, range(seeds), stuck=share))


def looked(random):
    """Five seeds, and three more unless the first verdicts please: the recorder counts the second look."""
    rows = simulated(random, range(8))
    first = verdicts(rows[rows["seed"] < 5])
    return first if "holds" in first else verdicts(rows, looks=2)


def planned(random, share=0.2):
    """Three looks at one claim, which no other shields, and an end at the first decision either way.

    The study's file says ``looks: 3``, so that each look has a third of the error to spend.
    """
    rows, found = simulated(random, range(12), stuck=share), []
    for seeds in (5, 8, 12):
        found = verdicts(rows[rows["seed"] < seeds], looks=3, claims=SIMULATED[:1])
        if set(found) & set(WRONG):
            break
    return found


def tuned(random):
    """Each arm at the best of three rates by three seeds that are not tested: the chosen ones look good there alone."""
    rates, tuning = (1e-3, 2e-3, 4e-3), (100, 101, 102)
    rows = simulated(random, (*tuning, *range(8)), rates=rates)
    swept = rows[rows["seed"].isin(tuning)].groupby(["placement", "learning_rate"])["eval_loss"].mean().unstack()
    best = swept.idxmin(axis=1)
    rows["tuned"] = rows["learning_rate"] == rows["placement"].map(best)
    rows = rows[rows["tuned"] | rows["seed"].isin(tuning)]
    whole = claims.judgeable(rows, ["placement"], tuning, (*tuning, *range(8)))
    assert set(whole.loc[whole["tuned"], "seed"]) == set(range(8))
    return verdicts(whole.assign(at_edge=False))


SETUPS = {"plain": plain, "three of ten runs stuck": stuck, "six of ten runs stuck": lambda random: stuck(random, 0.6)}
SETUPS |= {"two looks": looked, "three planned looks at one claim": planned}
SETUPS |= {"three planned looks, no run stuck": lambda random: planned(random, 0.0), "tuned on other seeds": tuned}


OFTEN = [("three planned looks at one claim", 80)]
ALL = [*OFTEN, *((setup, 4000) for setup in SETUPS)]


@pytest.mark.parametrize(("setup", "studies"), spread(ALL, OFTEN))
def test_without_an_effect_a_study_of_three_claims_is_wrong_in_at_most_one_of_twenty(setup, studies):
    random = np.random.default_rng(20261124)
    wrong = sum(any(verdict in WRONG for verdict in SETUPS[setup](random)) for _ in range(studies))
    assert stats.binomtest(wrong, studies, 0.05, alternative="greater").pvalue > 0.01, wrong


def test_a_single_comparison_without_an_effect_is_wrong_in_at_most_one_of_twenty():
    """The check itself, before any correction, with and without runs that failed: 4,000 times each."""
    random = np.random.default_rng(1)
    for share in (0.0, 0.2, 0.4):
        wrong = 0
        for _ in range(2000):
            arms = [[math.inf if random.random() < share else random.normal() for _ in range(8)] for _ in "ab"]
            found = compare_values(*(dict(enumerate(arm)) for arm in arms), by=0.01)
            wrong += found.verdict in WRONG
        assert stats.binomtest(wrong, 2000, 0.05, alternative="greater").pvalue > 0.01, (share, wrong)


def test_eight_pairs_show_an_effect_of_two_paired_standard_deviations():
    random = np.random.default_rng(8)
    paired = SPREAD * math.sqrt(2)
    seen = [verdicts(simulated(random, range(8), effect=-2 * paired))[0] == "holds" for _ in range(30)]
    assert sum(seen) >= 0.9 * 30
