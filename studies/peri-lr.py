"""Peri-LN Figures 3a, 12, 16-18."""

import math

from lamina.lab.papers.judging import (
    Finding,
    Trials,
    all_of,
    claim,
    compare_values,
    needs_scale,
    no_worse,
    optimum,
)

LEVEL = 0.01  # nats by which Peri-LN may lie above and still count as level


def at_every_rate(trials: Trials) -> Finding:
    both = trials.where(placement=["pre_ln", "peri_ln"])
    rates = (both.where(learning_rate=rate) for rate in both.values("learning_rate"))
    return all_of(*(no_worse(part, "peri_ln", than="pre_ln", within=LEVEL) for part in rates))


@claim(
    says="At every learning rate, Peri-LN's loss is lower than Pre-LN's loss, or at most 0.01 nats higher",
    paper="Figure 3a (400M to 3.2B, 1e-4 to 5e-3): Peri-LN has a lower loss than Pre-LN at every learning rate",
)
def peri_lr(trials: Trials) -> Finding:
    return at_every_rate(trials if "setup" not in trials.axes else trials.where(setup="as it is"))


@claim(
    says="With shorter texts, a longer warm-up or another number of tokens, Peri-LN's loss is also lower than "
    "Pre-LN's loss, or at most 0.01 nats higher, at every learning rate",
    paper="Figures 16 to 18: 8B, 16B and 30B tokens, texts of 2048 tokens, a warm-up of 30 % of the steps",
)
def peri_lr__setups(trials: Trials) -> Finding:
    if "setup" not in trials.axes:
        return needs_scale("paper", "this scale has one setup (cpu and paper have the others)")
    setups = [setup for setup in trials.values("setup") if setup not in ("as it is", "shallow")]
    return all_of(*(at_every_rate(trials.where(setup=setup)) for setup in setups))


@claim(
    says="Post-LN's best learning rate is lower than Pre-LN's best learning rate",
    paper="Figure 12: Post-LN's learning rates are far below 2e-3, the best learning rate of Pre-LN and Peri-LN at "
    "every size",
)
def peri_lr__post(trials: Trials) -> Finding:
    """From each seed's own sweep: its best rate, by the parabola through it."""
    if "setup" in trials.axes:
        trials = trials.where(setup="shallow" if "shallow" in trials.values("setup") else "as it is")
    best: dict[str, dict[int, float]] = {"post_ln": {}, "pre_ln": {}}
    for placement, rates in best.items():
        for seed in trials.seeds:
            try:
                rates[seed] = math.log2(optimum(trials.where(seed=seed), placement).rate)
            except ValueError:  # no rate trains
                continue
    return compare_values(
        best["post_ln"], best["pre_ln"], by=0.5, names=("log2 of the best rate of Post-LN", "of Pre-LN")
    )
