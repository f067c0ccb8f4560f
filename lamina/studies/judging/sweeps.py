"""Each arm's best learning rate, for studies that read a whole sweep and so tune none before."""

from __future__ import annotations

from lamina.core.frames import Frame
from lamina.studies.judging.checks import NOT_TRAINED
from lamina.studies.judging.trials import Trials


def at_best_rates(trials: Trials) -> Trials:
    """The trials of every arm at the best rate of its sweep: the fewest runs lost, then the lowest mean loss."""
    keys: list[str] = []
    for arm in trials.arms() or [{}]:
        table = trials.where(**arm).table
        rate = best_rate(table)
        keys += table.loc[table["learning_rate"] == rate, "key"].tolist()
    return trials.where(key=keys)


def best_rate(table: Frame) -> float:
    """The rate of a sweep's table at which the fewest runs diverged or got stuck, and of those the lowest mean loss."""

    def rank(rate: float) -> tuple[int, float]:
        runs = table[table["learning_rate"] == rate]
        lost = runs["status"].isin(NOT_TRAINED)
        mean = float(runs.loc[~lost, "eval_loss"].mean())
        return int(lost.sum()), mean if mean == mean else float("inf")

    return min((float(rate) for rate in sorted(table["learning_rate"].unique())), key=rank)
