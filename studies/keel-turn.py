"""Keel, Peri-LN and FuseNorm against Pre-LN at four depths of one size: studies/preregistration/keel-turn.md."""

import math
import statistics

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values, lower, values_of

SHAPES = {4: "4 x 152", 8: "8 x 108", 16: "16 x 76", 32: "32 x 54"}  # by blocks
LEAST = 0.005  # nats per doubling of the depth that count


@claim(
    says="With equally many parameters, Keel's loss minus Pre-LN's loss falls as the depth grows",
    paper="From 16 to 32 blocks (400M parameters, one seed), the difference is +.022, +.009, +.002, -.003 and -.007",
)
def keel_turn(trials: Trials) -> Finding:
    return _falls(trials, "keel")


@claim(
    says="Keel has a higher loss than Pre-LN with 4 blocks, and a lower loss than Pre-LN with 32 blocks",
    paper="The difference is +.022 with 16 blocks and -.007 with 32 blocks",
)
def keel_turn__sign(trials: Trials) -> Finding:
    shallow, deep = (trials.tuned().where(shape=SHAPES[blocks]) for blocks in (4, 32))
    return all_of(lower(shallow, "pre_ln", than="keel"), lower(deep, "keel", than="pre_ln"))


@claim(says="With equally many parameters, Peri-LN's loss minus Pre-LN's loss falls as the depth grows")
def keel_turn__peri_ln(trials: Trials) -> Finding:
    return _falls(trials, "peri_ln")


@claim(says="With equally many parameters, FuseNorm's loss minus Pre-LN's loss falls as the depth grows")
def keel_turn__fusenorm(trials: Trials) -> Finding:
    return _falls(trials, "fusenorm")


def _falls(trials: Trials, arm: str) -> Finding:
    """Judge the slope, seed by seed, of the difference to Pre-LN over log2 of the blocks: nats per doubling."""
    gaps: dict[int, dict[int, float]] = {}
    for blocks, shape in SHAPES.items():
        ours, pre = (values_of(trials.tuned().where(shape=shape), each) for each in (arm, "pre_ln"))
        gaps[blocks] = {seed: ours[seed] - pre[seed] for seed in ours if seed in pre}
    seeds = set.intersection(*(set(gap) for gap in gaps.values()))
    doublings = [math.log2(blocks) for blocks in SHAPES]
    slopes = {
        seed: statistics.linear_regression(doublings, [gap[seed] for gap in gaps.values()]).slope for seed in seeds
    }
    names = (f"nats per doubling of depth, {arm} - pre_ln", "none")
    return compare_values(slopes, dict.fromkeys(slopes, 0.0), by=LEAST, names=names)
