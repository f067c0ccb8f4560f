"""Rank placements by eval loss at each placement's best learning rate, and warn about the limits of the ranking.

Lamina ranks only placements that beat a bigram table of the training text. A model that does not beat this table does
not use its depth, so the loss shows nothing about the norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from lamina.core.backbone_presets import PRESETS
from lamina.core.initializers import SAME, SUITS, misfit
from lamina.core.json_types import Json
from lamina.jobs import columns
from lamina.jobs.status import severity
from lamina.reports.records import Frame, complete, rows_of

USUAL_TOKENS = 20  # per parameter, for the lowest loss at a given compute budget (Hoffmann et al. 2022)
ONE_SEED = "One seed cannot show which differences are noise. Add --seeds 0,1,2."


def summarize(results: Frame) -> Frame:
    """Return one row per placement at its best learning rate, sorted by the mean eval loss of the finished seeds.

    The best learning rate has the lowest mean loss among the learning rates with the highest fraction of finished
    seeds. So failed seeds cannot improve the rank of a learning rate. Placements that do not beat a bigram table come
    after the placements that do. Placements without a finished seed come last, sorted by status.

    The main columns:

    ``rank``: NaN for a placement without a rank.
    ``learning_rates``: the number of learning rates that the study tried for the placement.
    ``finished``, ``seeds``: the number of finished seeds, and of all seeds.
    ``status``: the worst status of the seeds.
    ``status_text``: the statuses in words, such as "2/3 finished, 1 diverged".
    ``eval_loss``, ``eval_loss_std``: the mean and standard deviation over the finished seeds (ddof 1, NaN for one
        seed).
    ``reason``: the reason for the status.
    """
    rows = []
    for _, group in complete(results).groupby("placement", sort=False):
        rates = [_at_rate(trials) for _, trials in group.groupby("learning_rate", dropna=False)]
        best = min(
            rates,
            key=lambda row: (
                -row["finished"] / row["seeds"],
                0 if row["finished"] else severity(row["status"]),
                _loss(row),
            ),
        )
        rows.append({**best, "learning_rates": group["learning_rate"].nunique()})
    rows.sort(key=lambda row: (is_above_bigram(row) if row["finished"] else 2 + severity(row["status"]), _loss(row)))
    ranks = [rank if is_ranked(row) else math.nan for rank, row in enumerate(rows, start=1)]
    return pd.DataFrame([{"rank": rank, **row} for rank, row in zip(ranks, rows, strict=True)])


def is_ranked(row: Json) -> bool:
    """Return whether a placement finished with an eval loss below the loss of a bigram table."""
    return bool(row["finished"]) and not is_above_bigram(row)


def is_above_bigram(row: Json) -> bool:
    """Return whether a row's eval loss is no better than a bigram table's loss."""
    return row["eval_loss"] >= row["bigram_entropy"]


def by_rate(results: Frame) -> Frame:
    """Return one row per placement and learning rate. The columns are as in ``summarize``, but without ranks."""
    groups = complete(results).groupby(["placement", "learning_rate"], sort=False)
    return pd.DataFrame([_at_rate(trials) for _, trials in groups])


def _at_rate(trials: Frame) -> Json:
    finished = trials[trials["status"].eq("finished") & np.isfinite(trials["eval_loss"])]
    counted = finished if len(finished) else trials[np.isfinite(trials["eval_loss"])]
    return {
        **{name: trials.iloc[0][name] for name in columns.aggregated("first")},
        "seeds": len(trials),
        "finished": len(finished),
        "status": max(trials["status"], key=severity),
        "status_text": _status_text(trials["status"]),
        "eval_loss": counted["eval_loss"].mean(),
        "eval_loss_std": finished["eval_loss"].std(ddof=1),
        **{name: (counted if len(counted) else trials)[name].mean() for name in columns.aggregated("mean")},
        **{name: trials[name].max() for name in columns.aggregated("max")},
        "reason": next((reason for reason in trials["reason"] if reason), ""),
    }


def _status_text(statuses: Frame) -> str:
    counts = statuses.value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    order = sorted(counts.index, key=severity)
    first, *rest = (f"{counts[s]}/{len(statuses)} {s}" if s == order[0] else f"{counts[s]} {s}" for s in order)
    return ", ".join([first, *rest])


def _loss(row: Json) -> float:
    return row["eval_loss"] if math.isfinite(row["eval_loss"]) else math.inf


def notices(
    summary: Frame,
    results: Frame,
    recommended: Mapping[str, str] | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[str]:
    """Return the warnings as plain text, such as too few seeds or interrupted trials. A page must escape them."""
    rows, width = rows_of(summary), _width_of(settings or {})
    misfits = dict.fromkeys(misfit(str(row["init"]), width) for row in rows if width is not None)
    misfits = [f"{each} To suit any width, add --init {SAME}{SUITS}" for each in misfits if each]
    compared = [
        _inits(rows, recommended or {}, width),
        _rates(rows),
        ONE_SEED * (max((row["seeds"] for row in rows), default=2) < 2),
    ]
    texts = [*(compared if len(rows) > 1 else ()), *misfits, *_edges(rows, results)]
    texts.append(_budget(rows) if len(rows) > 1 else "")
    cut = int((results["status"] == "interrupted").sum())
    stopped = f"{cut} trial{'s were' if cut > 1 else ' was'} interrupted. To continue the study, add --resume"
    texts.append(stopped * (cut > 0))
    return [text for text in texts if text]


def listed(parts: Sequence[str]) -> str:
    """Join the parts as ``a``, ``a and b``, or ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _inits(rows: list[Json], recommended: Mapping[str, str], width: int | None) -> str:
    """Warn if the placements have different initializers, or if a placement's source uses another initializer."""
    users: dict[str, list[str]] = {}
    for row in rows:
        if row["init"]:
            users.setdefault(row["init"], []).append(row["placement"])
    if len(users) > 1:
        groups = "; ".join(f"{init}: {listed(names)}" for init, names in users.items())
        return (
            f"The initializers differ ({groups}), so an effect of the initializer may look like an effect of the "
            "placement. To use one initializer for all, add --init same:small_scaled"
        )
    inits = [(name, recommended[name]) for names in users.values() for name in names if name in recommended]
    inits = [
        f"{name} ({initializer})"
        for name, initializer in inits
        if initializer not in users and (width is None or not misfit(initializer, width))
    ]
    if not inits:
        return ""
    return (
        f"All placements have the same initializer, {next(iter(users))}. The sources of these placements use another "
        f"initializer at other widths: {listed(inits)}. To use each source's initializer, add --init recommended"
    )


def _width_of(settings: Mapping[str, object]) -> int | None:
    """Return the study's width, or None if it is unknown or the study scales initial weights with the width."""
    width, preset = settings.get("hidden_size"), PRESETS.get(str(settings.get("backbone")))
    width = preset.fields["hidden_size"] if width is None and preset is not None else width
    return width if isinstance(width, int) and settings.get("width_scaling", "none") == "none" else None


def _rates(rows: list[Json]) -> str:
    counts = {row["placement"]: int(row["learning_rates"]) for row in rows if row["learning_rates"]}
    if not counts or max(counts.values()) < 2:
        return (
            "A single learning rate suits some placements better than others, so the comparison shows only which "
            "placement is best at this learning rate. To rank each placement at its best learning rate, add "
            "--learning-rates "
            "1e-3,3e-3,1e-2"
        )
    tried = listed([f"{name} {count}" for name, count in counts.items()])
    unequal = (
        f"The placements had different numbers of learning rates ({tried}), which favors placements with more "
        "learning rates."
    )
    return unequal * (len(set(counts.values())) > 1)


def _edges(rows: list[Json], results: Frame) -> list[str]:
    ends: dict[str, list[str]] = {"lowest": [], "highest": []}
    for row in rows:
        rates = results.loc[results["placement"] == row["placement"], "learning_rate"].dropna()
        if row["finished"] and rates.nunique() > 1:
            for end, value in (("lowest", rates.min()), ("highest", rates.max())):
                if row["learning_rate"] == value:
                    ends[end].append(f"{row['placement']} ({value:g})")
    return [
        f"For {listed(names)}, the best learning rate is the {end} in the list. A learning rate beyond the list may be "
        f"better and change the ranking. To try other learning rates for a placement, add --learning-rates-of"
        for end, names in ends.items()
        if names
    ]


def _budget(rows: list[Json]) -> str:
    """Warn if the runs saw so few tokens that they show only the start of training."""
    finished = [row for row in rows if row["finished"] and row["tokens"] > 0 and row["parameters"] > 0]
    ratio = max((row["tokens"] / row["parameters"] for row in finished), default=math.inf)
    if not ratio < USUAL_TOKENS:
        return ""
    return (
        f"{max(row['steps'] for row in finished):,.0f} steps give {ratio:.2g} tokens per parameter, but about "
        f"{USUAL_TOKENS} are usual. So the ranking shows which placement starts fastest, not which placement ends with "
        "the lowest loss."
    )
