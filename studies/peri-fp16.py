"""Peri-LN Figure 11."""

import math

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, compare_values, fraction, needs_scale
from lamina.lab.papers.judging.curves import numbers, rows

FP16 = 65504.0


def largest(table: Frame) -> float:
    """The largest |x| of the whole run."""
    return float(rows(table, metric="hidden_top_abs")["value"].max())


def growth(table: Frame) -> float:
    """The logarithm of the factor from the first step to the last, of the 100 largest |x|'s geometric mean."""
    top = rows(table, metric="hidden_top_abs")
    by_step = top.assign(log=top["value"].map(math.log)).groupby("step")["log"].mean().sort_index()
    return float(by_step.iloc[-1] - by_step.iloc[0])


@claim(
    says="During training, the largest hidden values exceed FP16's limit of 65504 in Pre-LN, but never in Peri-LN",
    paper="Figure 11 (3.2B): Pre-LN exceeds 65504 within 0.5B tokens, and Peri-LN does not",
)
def peri_fp16(trials: Trials) -> Finding:
    """Where Pre-LN stays below, a larger scale decides, unless Peri-LN passes the limit itself."""
    records = trials.tuned().record("layers")  # of all runs: one that diverges has passed the limit on its way
    pre, peri = (
        {seed: largest(part) for seed, part in records[records["placement"] == arm].groupby("seed")}
        for arm in ("pre_ln", "peri_ln")
    )
    stays = fraction((value < FP16 for value in peri.values()), at_least=1.0, name="Peri-LN below", seeds=len(peri))
    if stays.verdict == Verdict.HOLDS and trials.scale != "paper" and all(value < FP16 for value in pre.values()):
        highest = max(pre.values(), default=0.0)
        return needs_scale("paper", f"Pre-LN's largest |x| is {highest:.3g} here, far from 65504")
    passes = fraction((value > FP16 for value in pre.values()), at_least=0.5, name="Pre-LN above", seeds=len(pre))
    return all_of(stays, passes)


@claim(
    says="During training, the 100 largest hidden values grow by a larger factor in Pre-LN than in Peri-LN",
    paper="Figure 11: the two placements differ from the first steps on",
)
def peri_fp16__growth(trials: Trials) -> Finding:
    pre, peri = (numbers(trials.tuned(), arm, "layers", growth, at="records") for arm in ("pre_ln", "peri_ln"))
    return compare_values(pre, peri, lower=False, by=0.1, names=("log of the factor: Pre-LN", "Peri-LN"))
