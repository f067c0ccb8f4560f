"""One row per placement, at its best learning rate and sorted by eval loss, from one row per trial.

Only a placement whose loss is below that of a bigram table of the text it read is ranked: a model above it has shown
nothing of its depth, and so nothing of where its norms sit.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lamina.core.json_types import Json
from lamina.jobs import columns
from lamina.jobs.status import severity
from lamina.reports.records import Frame, complete


def summarize(results: Frame) -> Frame:
    """One row per placement at its best learning rate, sorted by the mean eval loss over the seeds that finished.

    The best rate is the one with the lowest mean among those at which every seed finished (if there is none:
    at which the most did), so that a rate cannot win by losing its bad seeds. Then come those that finished above the
    loss of a bigram table, then placements without a finished seed: short, stuck, interrupted, diverged, failed, and by
    eval loss within each. ``eval_loss_std`` is over finished seeds (ddof 1), NaN for fewer than two.

    Returns columns rank (NaN for what finished above a bigram table or did not finish), placement, learning_rate,
    learning_rates (how many were tried), seeds, finished, status (the worst), status_text ("finished", "2/3 finished,
    1 diverged"), eval_loss, eval_loss_std, reason, and every other aggregated column of ``lamina.jobs.columns``.
    """
    rows = []
    for _, group in complete(results).groupby("placement", sort=False):
        rates = [_at_rate(trials) for _, trials in group.groupby("learning_rate", dropna=False)]
        best = min(rates, key=_order_of_rates)
        rows.append({**best, "learning_rates": group["learning_rate"].nunique()})
    rows.sort(key=_order_of_placements)
    ranks = [rank if is_ranked(row) else math.nan for rank, row in enumerate(rows, start=1)]
    return pd.DataFrame([{"rank": rank, **row} for rank, row in zip(ranks, rows, strict=True)])


def is_ranked(row: Json) -> bool:
    """Whether a placement finished, and not above the loss of a bigram table."""
    return bool(row["finished"]) and not is_above_bigram(row)


def is_above_bigram(row: Json) -> bool:
    """Return whether a row's eval loss is known to be no lower than a bigram table's; older rows lack it."""
    return row["eval_loss"] >= row["bigram_entropy"]


def by_rate(results: Frame) -> Frame:
    """One row for each placement and learning rate, with the columns of ``summarize``."""
    groups = complete(results).groupby(["placement", "learning_rate"], sort=False)
    return pd.DataFrame([_at_rate(trials) for _, trials in groups])


def _at_rate(trials: Frame) -> Json:
    finished = trials[trials["status"].eq("finished") & np.isfinite(trials["eval_loss"])]
    counted = finished if len(finished) else trials[np.isfinite(trials["eval_loss"])]
    worst = max(trials["status"], key=severity)
    reasons = [reason for reason in trials["reason"] if reason]
    first = trials.iloc[0]
    return {
        **{name: first[name] for name in columns.aggregated("first")},
        "seeds": len(trials),
        "finished": len(finished),
        "status": worst,
        "status_text": _status_text(trials["status"]),
        "eval_loss": counted["eval_loss"].mean(),
        "eval_loss_std": finished["eval_loss"].std(ddof=1) if len(finished) > 1 else math.nan,
        **{name: (counted if len(counted) else trials)[name].mean() for name in columns.aggregated("mean")},
        **{name: trials[name].max() for name in columns.aggregated("max")},
        "reason": reasons[0] if reasons else "",
    }


def _status_text(statuses: Frame) -> str:
    counts = statuses.value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    order = sorted(counts.index, key=severity)
    first, *others = (f"{counts[s]}/{len(statuses)} {s}" if s == order[0] else f"{counts[s]} {s}" for s in order)
    return ", ".join([first, *others])


def _loss(row: Json) -> float:
    return row["eval_loss"] if math.isfinite(row["eval_loss"]) else math.inf


def _order_of_rates(row: Json) -> tuple[float, ...]:
    return (-row["finished"] / row["seeds"], severity(row["status"]) if not row["finished"] else 0, _loss(row))


def _order_of_placements(row: Json) -> tuple[float, ...]:
    return (is_above_bigram(row) if row["finished"] else 2 + severity(row["status"]), _loss(row))
