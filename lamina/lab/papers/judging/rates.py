"""Choose each configuration's best learning rate among the runs that a claim reads.

If the compared runs also determine the learning rate, the chosen configuration looks too good. The verdict is then
inconclusive.
"""

from __future__ import annotations

from lamina.lab.papers.judging.checks import NOT_TRAINED
from lamina.lab.papers.judging.trials import Trials


def at_best_rates(trials: Trials) -> Trials:
    """Return each configuration's runs at the configuration's best learning rate."""
    keys: list[str] = []
    for arm in trials.arms() or [{}]:
        of_arm = trials.where(**arm)
        keys += map(str, of_arm.where(learning_rate=best_rate(of_arm)).values("key"))
    return trials.where(key=keys)


def best_rate(trials: Trials) -> float:
    """Return the learning rate at which the fewest runs of a configuration fail. The mean loss decides ties."""
    trials.choose_rate()

    def rank(rate: object) -> tuple[int, float]:
        runs = trials.where(learning_rate=rate)
        losses, lost = runs.rows["eval_loss"], runs.rows["status"].isin(NOT_TRAINED)
        mean = float(losses[~lost].mean())
        return int(lost.sum()), mean if mean == mean else float("inf")

    return float(str(min(sorted(trials.values("learning_rate"), key=lambda rate: float(str(rate))), key=rank)))
