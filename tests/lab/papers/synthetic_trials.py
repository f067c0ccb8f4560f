"""Tables of results as a study's engine makes them, from losses that a test chooses."""

import pandas as pd

from lamina.lab.papers.judging import Trials


def rows(arm, losses, statuses="finished", axis="placement", **values):
    """One row per seed."""
    statuses = [statuses] * len(losses) if isinstance(statuses, str) else statuses
    return [
        {axis: arm, "seed": seed, "learning_rate": 5e-3, "eval_loss": loss, "status": status, "tuned": True,
         "key": f"{arm}-{seed}", **values}
        for seed, (loss, status) in enumerate(zip(losses, statuses, strict=True))
    ]  # fmt: skip


def trials(*arms, axes=("placement", "learning_rate", "seed"), measures=None):
    """Trials of the rows of these arms."""
    return Trials(pd.DataFrame([row for arm in arms for row in arm]), axes=axes, measures=measures)
