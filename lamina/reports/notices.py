"""Warnings to read before a ranking: what differed between trials, and what was tried only once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lamina.core.backbone_presets import PRESETS
from lamina.core.initializers import SAME, SUITS, unsuited
from lamina.core.json_types import Json
from lamina.reports.records import Frame, rows_of

USUAL_TOKENS = 20  # a parameter: what a run that makes the best of its compute takes (Hoffmann et al. 2022)


def notices(
    summary: Frame,
    results: Frame,
    recommended: Mapping[str, str] | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[str]:
    """List the warnings: differing initializers, too few rates or seeds, edges of a sweep, cut trials.

    ``summary`` is that of ``summarize``; ``recommended`` the initializer that each placement's plan names, where known;
    ``settings`` those of the study, which give the width.
    Plain text: whoever puts it into a page escapes it.
    """
    rows = rows_of(summary)
    texts = []
    if len(rows) > 1:
        texts += [*_inits(rows, recommended or {}), *_rates(rows), *_seeds(rows)]
    texts += _widths(rows, settings or {})
    texts += [*_edges(rows, results), *_budget(rows)]
    cut = int((results["status"] == "interrupted").sum())
    if cut:
        texts.append(f"{cut} trial{'s were' if cut > 1 else ' was'} interrupted: --resume continues the study.")
    return texts


def listed(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _inits(rows: list[Json], recommended: Mapping[str, str]) -> list[str]:
    """Warn if the initializers differ, or if a source uses another one than the common one."""
    users: dict[str, list[str]] = {}
    for row in rows:
        if row["init"]:
            users.setdefault(row["init"], []).append(row["placement"])
    if len(users) > 1:
        groups = "; ".join(f"{init}: {listed(names)}" for init, names in users.items())
        return [
            f"The initializers differ ({groups}), so this comparison is not paired: what looks like an effect of "
            "the placement may be one of its initializer. --init same:small_scaled gives all the same one."
        ]
    others = [(name, recommended[name]) for init in users for name in users[init] if name in recommended]
    others = [(name, own) for name, own in others if own not in users]
    if not others:
        return []
    recommended_names = listed([f"{name} ({own})" for name, own in others])
    return [
        f"All placements have one initializer, {next(iter(users))}. The sources of {recommended_names} have another, "
        "at their own widths; --init recommended takes these, and then compares placement and initializer together."
    ]


def _widths(rows: list[Json], settings: Mapping[str, object]) -> list[str]:
    """Warn of initializers whose standard deviation does not suit the width; width scaling changes it."""
    width, preset = settings.get("hidden_size"), PRESETS.get(str(settings.get("backbone")))
    width = preset.fields["hidden_size"] if width is None and preset is not None else width
    if not isinstance(width, int) or settings.get("width_scaling", "none") != "none":
        return []
    misfits = {str(row["init"]): misfit for row in rows if (misfit := unsuited(str(row["init"]), width)) is not None}
    return [
        f"The initializer {init} has a standard deviation of {std:.3g} in the blocks; the width of {width} wants about "
        f"{suited:.3g}. So far off, the initializer decides more than the placement. --init {SAME}{SUITS} suits any "
        "width."
        for init, (std, suited) in misfits.items()
    ]


def _rates(rows: list[Json]) -> list[str]:
    counts = {row["placement"]: int(row["learning_rates"]) for row in rows if row["learning_rates"]}
    if not counts or max(counts.values()) < 2:
        return [
            "One learning rate: placements differ in the rate that suits them, so a comparison at a single rate is "
            "confounded: it shows which one does best at this rate, not which is best. To rank each placement at its "
            "best of several rates: --learning-rates 1e-3,3e-3,1e-2"
        ]
    if len(set(counts.values())) < 2:
        return []
    tried = listed([f"{name} {count}" for name, count in counts.items()])
    return [f"Not all had the same number of learning rates to choose from ({tried}), which favors those with more."]


def _seeds(rows: list[Json]) -> list[str]:
    if max(row["seeds"] for row in rows) > 1:
        return []
    return ["One seed: small differences may be noise, and nothing here shows how small. --seeds 0,1,2 does."]


def _edges(rows: list[Json], results: Frame) -> list[str]:
    ends: dict[str, list[str]] = {"lowest": [], "highest": []}
    for row in rows:
        rates = results.loc[results["placement"] == row["placement"], "learning_rate"].dropna()
        if row["finished"] and rates.nunique() > 1:
            for end, value in (("lowest", rates.min()), ("highest", rates.max())):
                if row["learning_rate"] == value:
                    ends[end].append(f"{row['placement']} ({value:g})")
    return [
        f"For {listed(names)} the best learning rate is the {end} one tried: the true best may lie beyond, and may "
        "move the ranking. --learning-rates-of gives a placement rates of its own."
        for end, names in ends.items()
        if names
    ]


def _budget(rows: list[Json]) -> list[str]:
    """Warn if the tokens are so few that they show only the start of training."""
    finished = [row for row in rows if row["finished"] and row["tokens"] > 0 and row["parameters"] > 0]
    if len(rows) < 2 or not finished:
        return []
    steps = max(row["steps"] for row in finished)
    ratio = max(row["tokens"] / row["parameters"] for row in finished)
    if not math.isfinite(ratio) or ratio >= USUAL_TOKENS:
        return []
    return [
        f"{steps:,.0f} steps are {ratio:.2g} tokens per parameter, where about {USUAL_TOKENS} are usual: this measures "
        "which one starts fastest, not which ends best."
    ]
