"""The registered slope over depth, on made-up losses whose slope is known; and keel-alpha-width's gap."""

import pytest
from lab.papers.synthetic_trials import rows, trials

from lamina.lab.papers.judging import Verdict, judge, load_claims
from lamina.lab.papers.study_catalog import catalog_folder, read_study

SHAPES = ["4 x 152", "8 x 108", "16 x 76", "32 x 54"]
NOISE = [0.001, -0.001, 0.002, -0.002, 0.0]


def verdicts(name, table):
    claims = load_claims(catalog_folder() / f"{name}.py", trusted=True)
    return {one.claim: one for one in judge(claims, table)}


def turn(start, slope):
    """Pre-LN at 3.5 with a seed's offset; the others start + slope * doublings above it."""
    arms = []
    for place, shape in enumerate(SHAPES):
        for arm in ("pre_ln", "keel", "peri_ln", "fusenorm"):
            gap = 0.0 if arm == "pre_ln" else start + slope * place
            losses = [3.5 + 0.1 * seed + gap + (1 + place) * NOISE[seed] * (arm != "pre_ln") for seed in range(5)]
            arms.append(rows(arm, losses, shape=shape))
    return verdicts("keel-turn", trials(*arms, axes=("placement", "shape", "learning_rate", "seed")))


@pytest.mark.parametrize(
    ("start", "slope", "falls", "turns"),
    [
        (0.03, -0.02, Verdict.HOLDS, Verdict.HOLDS),
        (0.1, -0.02, Verdict.HOLDS, Verdict.PART_FAILED),  # falls, and never turns
        (-0.03, 0.02, Verdict.REVERSED, Verdict.REVERSED),
        (0.0, -0.002, Verdict.EXCLUDED, None),  # less than 0.005 per doubling
    ],
)
def test_the_slope_is_that_of_the_difference_over_the_doublings(start, slope, falls, turns):
    found = turn(start, slope)
    for name in ("keel-turn", "keel-turn/peri-ln", "keel-turn/fusenorm"):
        assert found[name].verdict == falls, found[name]
        assert f"difference {slope:.4g}" in found[name].ours
    if turns is not None:
        assert found["keel-turn/sign"].verdict == turns


def test_the_shapes_are_of_one_size_and_the_test_seeds_choose_no_rate():
    scale = read_study("keel-turn").scales["cpu"]
    assert list(scale.axes["shape"]) == SHAPES
    assert not set(scale.tuning.seeds) & set(scale.seeds)
    assert len(scale.seeds) == 5


@pytest.mark.parametrize(("change", "verdict"), [(-0.03, Verdict.HOLDS), (0.03, Verdict.REVERSED)])
def test_the_gap_of_the_larger_alpha_is_compared_between_widths(change, verdict):
    arms = []
    for width, gap in ((48, 0.02), (96, 0.02 + change / 2), (192, 0.02 + change)):
        for alpha, extra in (("L/4", 0.05), ("L", 0.0), ("4 L", gap)):
            losses = [2.0 + 0.1 * seed + extra + NOISE[seed] * (alpha != "L") * width / 48 for seed in range(5)]
            arms.append(rows(alpha, losses, axis="alpha", hidden_size=width))
    table = trials(*arms, axes=("alpha", "hidden_size", "learning_rate", "seed"))
    assert verdicts("keel-alpha-width", table)["keel-alpha-width"].verdict == verdict
