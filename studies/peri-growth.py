"""Peri-LN Figures 1, 6, 14, 15."""

import math
from collections.abc import Callable

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, below, claim, compare_values, trains
from lamina.lab.papers.judging.curves import numbers, rows, split

TWICE = 2.0


def last_variance(table: Frame) -> float:
    states = rows(table, metric="variance", role="state")
    return math.log(states.set_index("layer")["value"].sort_index().iloc[-1])


def metric(name: str) -> Callable[[Frame], float]:
    return lambda table: float(rows(table, metric=name)["value"].iloc[0])


def growth(trials: Trials, placement: str) -> dict[int, float]:
    """By seed the logarithm of the factor by which training multiplies the last state's variance."""
    before = numbers(trials, placement, "hidden_states", last_variance, at="init")
    after = numbers(trials, placement, "hidden_states", last_variance)
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


@claim(
    says="Training multiplies the variance of the last hidden state by a larger factor in Pre-LN than in Peri-LN",
    paper="Figure 1 (1.5B, 6.3B tokens): the variance grows explosively in Pre-LN and moderately in Peri-LN",
)
def peri_growth(trials: Trials) -> Finding:
    parts = split(trials.tuned(), "size")
    names = ("log of Peri-LN's growth", "log of Pre-LN's")
    return all_of(*(compare_values(growth(p, "peri_ln"), growth(p, "pre_ln"), by=0.1, names=names) for p in parts))


@claim(
    says="After training, the hidden states' variance grows exponentially with depth in Pre-LN, and linearly in "
    "Peri-LN",
    paper="Section 5.1: the variance grows exponentially with depth in Pre-LN, and moderately in Peri-LN",
)
def peri_growth__exponential(trials: Trials) -> Finding:
    found = []
    for part in split(trials.tuned(), "size"):
        for placement, curved in (("pre_ln", True), ("peri_ln", False)):
            line = numbers(part, placement, "hidden_states", metric("growth_linear_r2"))
            exponential = numbers(part, placement, "hidden_states", metric("growth_exponential_r2"))
            names = (f"{placement}: R^2 of a line", "of an exponential")
            found.append(compare_values(line, exponential, lower=curved, by=0.005, names=names))
    return all_of(*found)


@claim(
    says="During training, the variance of Post-LN's last hidden state changes by at most a factor of two",
    paper="Figure 6: the variance is constant",
)
def peri_growth__post_constant(trials: Trials) -> Finding:
    """Of Post-LN that trains alone: in a stuck run nothing changes, whatever it keeps."""
    found = []
    for part in split(trials.tuned(), "size"):
        if (learned := trains(part, "post_ln")).verdict != Verdict.HOLDS:
            found.append(learned.undecided("a run that does not train keeps its variance for that reason alone"))
            continue
        measured = (part.arm("post_ln").measure("hidden_states", at=at).groupby("seed") for at in ("init", "end"))
        begin, end = ({int(str(seed)): last_variance(table) for seed, table in tables} for tables in measured)
        change = {seed: abs(end[seed] - begin[seed]) for seed in sorted(begin.keys() & end.keys())}
        found.append(below(change, math.log(TWICE), name="log of the factor"))
    return all_of(*found)
