"""Find each setting's best learning rate in a sweep.

If you choose a setting's learning rate on the same runs that you compare, the setting looks too good.
`Trials.choose_rate` records that a claim chose learning rates on the runs that it compares. A claim that chose its
learning rates in this way gets no verdict.
"""

from __future__ import annotations

from lamina.lab.papers.judging.checks import NOT_TRAINED
from lamina.lab.papers.judging.trials import Trials


def at_best_rates(trials: Trials) -> Trials:
    """Return the trials of every arm at the arm's best learning rate (see ``best_rate``)."""
    keys: list[str] = []
    for arm in trials.arms() or [{}]:
        of_arm = trials.where(**arm)
        keys += map(str, of_arm.where(learning_rate=best_rate(of_arm)).values("key"))
    return trials.where(key=keys)


def best_rate(trials: Trials) -> float:
    """Return the learning rate at which the fewest of an arm's runs fail. At a tie, the lowest mean loss decides."""
    trials.choose_rate()

    def rank(rate: object) -> tuple[int, float]:
        runs = trials.where(learning_rate=rate)
        losses, lost = runs.rows["eval_loss"], runs.rows["status"].isin(NOT_TRAINED)
        mean = float(losses[~lost].mean())
        return int(lost.sum()), mean if mean == mean else float("inf")

    return float(str(min(sorted(trials.values("learning_rate"), key=lambda rate: float(str(rate))), key=rank)))
