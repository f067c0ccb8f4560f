"""Each arm's best learning rate, for studies that read a whole sweep and so tune none before.

A rate that is chosen by the results of the runs that are then compared flatters its arm: `Trials.choose_rate` notes it,
and the judge decides nothing by it.
"""

from __future__ import annotations

from lamina.papers.judging.checks import NOT_TRAINED
from lamina.papers.judging.trials import Trials


def at_best_rates(trials: Trials) -> Trials:
    """The trials of every arm at the best rate of its sweep: the fewest runs lost, then the lowest mean loss."""
    keys: list[str] = []
    for arm in trials.arms() or [{}]:
        of_arm = trials.where(**arm)
        keys += map(str, of_arm.where(learning_rate=best_rate(of_arm)).values("key"))
    return trials.where(key=keys)


def best_rate(trials: Trials) -> float:
    """The rate at which the fewest of an arm's runs diverged or got stuck, and of those the lowest mean loss."""
    trials.choose_rate()

    def rank(rate: object) -> tuple[int, float]:
        runs = trials.where(learning_rate=rate)
        losses, lost = runs.rows["eval_loss"], runs.rows["status"].isin(NOT_TRAINED)
        mean = float(losses[~lost].mean())
        return int(lost.sum()), mean if mean == mean else float("inf")

    return float(str(min(sorted(trials.values("learning_rate"), key=lambda rate: float(str(rate))), key=rank)))
