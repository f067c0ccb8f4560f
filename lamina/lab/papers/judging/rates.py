"""Find each setting's best learning rate in a sweep.

A rate chosen on the same runs that are then compared makes its arm look too good. `Trials.choose_rate` notes such a
choice, and the judge bases no verdict on it.
"""

from __future__ import annotations

from lamina.lab.papers.judging.checks import NOT_TRAINED
from lamina.lab.papers.judging.trials import Trials


def at_best_rates(trials: Trials) -> Trials:
    """Return the trials of every arm at its best learning rate: the rate at which the fewest runs fail and, among
    equals, the mean loss is lowest.
    """
    keys: list[str] = []
    for arm in trials.arms() or [{}]:
        of_arm = trials.where(**arm)
        keys += map(str, of_arm.where(learning_rate=best_rate(of_arm)).values("key"))
    return trials.where(key=keys)


def best_rate(trials: Trials) -> float:
    """Return an arm's best learning rate: the rate at which the fewest runs fail and, among equals, the mean loss is
    lowest.
    """
    trials.choose_rate()

    def rank(rate: object) -> tuple[int, float]:
        runs = trials.where(learning_rate=rate)
        losses, lost = runs.rows["eval_loss"], runs.rows["status"].isin(NOT_TRAINED)
        mean = float(losses[~lost].mean())
        return int(lost.sum()), mean if mean == mean else float("inf")

    return float(str(min(sorted(trials.values("learning_rate"), key=lambda rate: float(str(rate))), key=rank)))
