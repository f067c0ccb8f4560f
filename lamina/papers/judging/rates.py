"""The learning rates of a sweep: each arm's best rate, and what a size can decide there.

A rate that is chosen by the results of the runs that are then compared flatters its arm: `Trials.choose_rate` notes it,
and the judge decides nothing by it.
"""

from __future__ import annotations

import math
import statistics
from contextlib import suppress

from lamina.core.frames import Frame
from lamina.papers.judging.checks import NOT_TRAINED, optimum, values_of
from lamina.papers.judging.statistics import CONFIDENCE
from lamina.papers.judging.trials import Trials


def at_best_rates(trials: Trials) -> Trials:
    """Return the trials of every arm at its best rate: the fewest runs fail there, then the mean loss is lowest."""
    keys: list[str] = []
    for arm in trials.arms() or [{}]:
        of_arm = trials.where(**arm)
        keys += map(str, of_arm.where(learning_rate=best_rate(of_arm)).values("key"))
    return trials.where(key=keys)


def best_rate(trials: Trials) -> float:
    """Return an arm's best rate: the fewest runs fail at it, and among such rates its mean loss is lowest."""
    trials.choose_rate()

    def rank(rate: object) -> tuple[int, float]:
        runs = trials.where(learning_rate=rate)
        losses, lost = runs.rows["eval_loss"], runs.rows["status"].isin(NOT_TRAINED)
        mean = float(losses[~lost].mean())
        return int(lost.sum()), mean if mean == mean else float("inf")

    return float(str(min(sorted(trials.values("learning_rate"), key=lambda rate: float(str(rate))), key=rank)))


POWER = 0.9
COLUMNS = ("placement", "best_rate", "optimum", "at_edge", "loss", "std", "seeds")
PAIRED = ("difference", "paired_std", "detectable")


def spreads(trials: Trials, *, reference: str = "pre_ln", pairs: int = 5) -> Frame:
    """One row per placement that trains at some rate of a sweep, the lowest loss first.

    Columns: ``best_rate`` (of those trained), ``optimum`` (a parabola's through log rate), ``at_edge``; at the best
    rate the mean ``loss``, its ``std`` over the seeds and their number; of the difference to ``reference``, each at its
    own best rate and paired by seed, the mean ``difference``, its standard deviation ``paired_std``, and
    ``detectable``: the difference that this many ``pairs`` show with a power of 90 %.
    """
    import pandas as pd

    best = {}
    for arm in map(str, trials.values("placement")):
        with suppress(ValueError):  # it trains at no rate
            found = optimum(trials, arm)
            best[arm] = found, values_of(trials.where(placement=arm, learning_rate=found.trained), arm)
    rows = []
    for arm, (found, losses) in best.items():
        others = best[reference][1] if reference in best and arm != reference else {}
        mean, std = _mean_and_std(list(losses.values()))
        row = [arm, found.trained, found.rate, found.at_edge, mean, std, len(losses)]
        difference, std = _mean_and_std([losses[seed] - others[seed] for seed in losses if seed in others])
        rows.append([*row, difference, std, detectable(std, pairs)])
    return pd.DataFrame(rows, columns=[*COLUMNS, *PAIRED]).sort_values("loss", ignore_index=True)


def detectable(std: float, pairs: int) -> float:
    """Return the mean difference that a two-sided t test on so many pairs shows with a power of about 90 %."""
    from scipy import stats

    quantiles = stats.t.ppf([1 - (1 - CONFIDENCE) / 2, POWER], pairs - 1)
    return float(quantiles.sum()) * std / math.sqrt(pairs)


def _mean_and_std(values: list[float]) -> tuple[float, float]:
    """Return the mean and a sample's standard deviation (n - 1); NaN where there are too few values."""
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else math.nan
