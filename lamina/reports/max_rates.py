"""The largest learning rates by placement: what `lamina max-lr` prints and its page shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.jobs.status import Status
from lamina.reports.notices import listed
from lamina.reports.records import Frame, complete, rows_of
from lamina.training.monitor.max_rate_rules import NONE


@dataclass(frozen=True, kw_only=True)
class MaxRate:
    """A placement's largest learning rate.

    Attributes:
        placement: its spec.
        mean, std: over the seeds with a rate; the standard deviation (ddof 1) is NaN for fewer than two.
        low, high: the least and the greatest of them.
        seeds: how many have a rate.
        open: how many of them reached the end of the warm-up, so that the mean is a lower bound.
        loss: the mean smoothed loss at these rates.
        ends: the rules that stopped the runs, and how many each, as text.
    """

    placement: str
    mean: float
    std: float
    low: float
    high: float
    seeds: int
    open: int
    loss: float
    ends: str


def summarize(results: Frame) -> list[MaxRate]:
    """One row per placement, the highest mean rate first; ``results`` are the rows of results.csv."""
    rows = []
    for placement, group in complete(results).groupby("placement", sort=False):
        rates = group[group["max_learning_rate"].notna()]
        values = rates["max_learning_rate"]
        ends = Counter(row["stop_rule"] or row["status"] for row in rows_of(group))
        rows.append(
            MaxRate(
                placement=str(placement),
                mean=float(values.mean()),
                std=float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                low=float(values.min()),
                high=float(values.max()),
                seeds=len(values),
                open=int(rates["stop_rule"].eq(NONE).sum()),
                loss=float(rates["loss_at_stop"].mean()),
                ends=_counted(ends),
            )
        )
    return sorted(rows, key=lambda row: -row.mean if row.seeds else math.inf)


def spread(row: MaxRate) -> str:
    """The mean and the standard deviation of a placement's rates as text; a lower bound has a sign."""
    if not row.seeds:
        return "-"
    bound = ">= " if row.open else ""
    return f"{bound}{row.mean:.3g}" + (f" ± {row.std:.2g}" if math.isfinite(row.std) else "")


def notices(rows: Sequence[MaxRate]) -> list[str]:
    """What a reader should beware of. Plain text."""
    texts = []
    beyond = [row.placement for row in rows if row.open]
    if beyond:
        texts.append(
            f"{listed(beyond)} did not fail at every seed: the largest rate lies beyond the warm-up's end "
            "(a higher --max-learning-rate shows where)."
        )
    if rows and max(row.seeds for row in rows) < 2:
        texts.append("One seed: small differences may be noise, and nothing here shows how small. --seeds 0,1,2 does.")
    if any(str(Status.INTERRUPTED) in row.ends for row in rows):
        texts.append("Some trials were interrupted: --resume continues the study.")
    return texts


def _counted(ends: Counter[str]) -> str:
    if len(ends) == 1:
        return next(iter(ends))
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())
