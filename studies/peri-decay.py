"""Peri-LN Figure 10a, 10b and Table 7."""

import math

from lamina.core.frames import Frame
from lamina.jobs.status import Status
from lamina.lab.papers.judging import (
    Finding,
    Trials,
    all_of,
    claim,
    compare_values,
    fraction,
    lower,
    monotone,
    needs_scale,
)
from lamina.lab.papers.judging.curves import along, numbers, rows
from lamina.lab.papers.judging.rates import at_best_rates, best_rate


def log_variance(table: Frame) -> float:
    """Of the last state."""
    states = rows(table, metric="variance", role="state").set_index("layer")["value"].sort_index()
    return math.log(states.iloc[-1])


def at_one_rate(trials: Trials) -> Trials:
    """At the rate that is Pre-LN's best with the paper's own decay, the last but one."""
    usual = sorted(trials.values("weight_decay"))[-2]
    return trials.where(learning_rate=best_rate(trials.where(placement="pre_ln", weight_decay=usual)))


def fall(trials: Trials, placement: str) -> dict[int, float]:
    """By seed, how far the strongest decay lowers the logarithm of the last state's variance."""
    by_decay = [numbers(part, placement, "hidden_states", log_variance) for _, part in along(trials, "weight_decay")]
    weak, *_, strong = by_decay
    return {seed: weak[seed] - strong[seed] for seed in sorted(weak.keys() & strong.keys())}


@claim(
    says="The variance of Pre-LN's last hidden state falls as the weight decay rises. The strongest weight decay "
    "lowers this variance by a larger factor in Pre-LN than in Peri-LN",
    paper="Figure 10a (400M): the variance is much lower in Pre-LN, and only slightly lower in Peri-LN",
)
def peri_decay(trials: Trials) -> Finding:
    fixed = at_one_rate(trials)
    by_decay = {
        decay: numbers(part, "pre_ln", "hidden_states", log_variance) for decay, part in along(fixed, "weight_decay")
    }
    names = ("fall of log variance: Pre-LN", "Peri-LN")
    return all_of(
        monotone(by_decay, rising=False, name="log of Pre-LN's variance"),
        compare_values(fall(fixed, "pre_ln"), fall(fixed, "peri_ln"), lower=False, by=0.1, names=names),
    )


@claim(
    says="With every weight decay, Peri-LN has a lower loss than Pre-LN",
    paper="Table 7: Peri-LN is better with 0, 0.0033, 0.033 and 0.33 (its numbers are not in the text)",
)
def peri_decay__gap(trials: Trials) -> Finding:
    best = at_best_rates(trials)
    return all_of(*(lower(part, "peri_ln", than="pre_ln") for _, part in along(best, "weight_decay")))


@claim(
    says="Pre-LN's diverged seeds train if the weight decay is ten times as large",
    paper="Figure 10b: seed 4 diverges with 0.033, but not with 0.33",
)
def peri_decay__rescue(trials: Trials) -> Finding:
    usual, strong = sorted(trials.values("weight_decay"))[-2:]
    pre = trials.arm("pre_ln").table.set_index(["learning_rate", "seed"])
    lost = pre[(pre["weight_decay"] == usual) & (pre["status"] == Status.DIVERGED.value)].index
    if not len(lost):
        return needs_scale("gpu" if trials.scale == "cpu" else "paper", "no run of Pre-LN diverges here")
    ends = pre[pre["weight_decay"] == strong]["status"].reindex(lost).dropna() != Status.DIVERGED.value
    return fraction(ends, at_least=0.5, name="diverging runs of Pre-LN that the stronger decay saves", seeds=len(ends))
