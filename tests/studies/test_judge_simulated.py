"""The whole judge on trials without an effect, and with one: how often it is wrong, and how often it sees it."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lamina.papers.judging import Trials, claims, compare_values, judge, lower, ordered
from lamina.papers.judging.claims import Claim

ARMS = ("one", "two", "three")
WRONG = ("holds", "reversed", "a part failed")  # "excluded" is right: there is no difference
SPREAD = 0.1  # of a loss over the seeds, half of it shared by the arms of a seed
CLAIMS = [
    Claim(name="x", says="", paper="", check=lambda trials: lower(trials.tuned(), "one", than="two")),
    Claim(name="x/b", says="", paper="", check=lambda trials: lower(trials.tuned(), "three", than="two")),
    Claim(name="x/c", says="", paper="", check=lambda trials: ordered(trials.tuned(), ARMS)),
]


def table(random, seeds, *, effect=0.0, stuck=0.0, rates=(1e-3,), key=""):
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


def verdicts(rows, looks=1, claims=CLAIMS):
    return [one.verdict for one in judge(claims, Trials(rows, axes=("placement",)), looks=looks)]


def plain(random, seeds=8):
    return verdicts(table(random, range(seeds)))


def stuck(random, share=0.3, seeds=8):
    return verdicts(table(random, range(seeds), stuck=share))


def looked(random):
    """Five seeds, and three more unless the first verdicts please: the recorder counts the second look."""
    rows = table(random, range(8))
    first = verdicts(rows[rows["seed"] < 5])
    return first if "holds" in first else verdicts(rows, looks=2)


def planned(random):
    """Three looks at one claim, which no other shields, some runs stuck, and an end at the first decision either way.

    The study's file says ``looks: 3``, so that each look has a third of the error to spend.
    """
    rows, found = table(random, range(12), stuck=0.2), []
    for seeds in (5, 8, 12):
        found = verdicts(rows[rows["seed"] < seeds], looks=3, claims=CLAIMS[:1])
        if set(found) & set(WRONG):
            break
    return found


def tuned(random):
    """Each arm at the best of three rates by three seeds that are not tested: the chosen ones look good there alone."""
    rates, tuning = (1e-3, 2e-3, 4e-3), (100, 101, 102)
    rows = table(random, (*tuning, *range(8)), rates=rates)
    swept = rows[rows["seed"].isin(tuning)].groupby(["placement", "learning_rate"])["eval_loss"].mean().unstack()
    best = swept.idxmin(axis=1)
    rows["tuned"] = rows["learning_rate"] == rows["placement"].map(best)
    rows = rows[rows["tuned"] | rows["seed"].isin(tuning)]
    whole = claims.judgeable(rows, ["placement"], tuning, (*tuning, *range(8)))
    assert set(whole.loc[whole["tuned"], "seed"]) == set(range(8))
    return verdicts(whole.assign(at_edge=False))


SETUPS = {
    "plain": plain,
    "three of ten runs stuck": stuck,
    "six of ten runs stuck": lambda random: stuck(random, 0.6),
    "two looks": looked,
    "three planned looks at one claim": planned,
    "tuned on other seeds": tuned,
}


@pytest.mark.parametrize("studies", [150, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setup", SETUPS)
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


@pytest.mark.parametrize("pairs", [5, 8, 12])
def test_the_interval_covers_what_it_says(pairs):
    random = np.random.default_rng(pairs)
    zero, covered = dict.fromkeys(range(pairs), 0.0), 0
    for _ in range(3000):
        found = compare_values(dict(enumerate(random.normal(1.0, 1.0, pairs))), zero, by=0.01)
        covered += found.interval[0] <= 1.0 <= found.interval[1]
    assert 0.935 <= covered / 3000 <= 0.965


def test_eight_pairs_show_an_effect_of_two_paired_standard_deviations():
    random = np.random.default_rng(8)
    paired = SPREAD * math.sqrt(2)
    seen = [verdicts(table(random, range(8), effect=-2 * paired))[0] == "holds" for _ in range(60)]
    assert sum(seen) >= 0.9 * 60


def test_a_difference_of_half_the_smallest_that_counts_hardly_ever_holds_and_is_excluded_with_little_noise():
    random = np.random.default_rng(9)
    zero = dict.fromkeys(range(8), 0.0)
    found = [
        compare_values(dict(enumerate(random.normal(-0.005, 0.002, 8))), zero, by=0.01).verdict for _ in range(500)
    ]
    assert found.count("holds") == 0
    assert found.count("excluded") > 450
