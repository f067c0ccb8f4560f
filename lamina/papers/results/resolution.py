"""What a size can decide: a sweep's best rates, spreads over seeds, and the difference that paired seeds show."""

from __future__ import annotations

import math

from lamina.papers.judging.spreads import spreads
from lamina.papers.judging.trials import Trials
from lamina.papers.pages.folder import StudyFolder
from lamina.papers.results.markdown import NONE, number, plain, table
from lamina.reports.records import rows_of

PAIRS = 5
_REFERENCE = "pre_ln"


def resolution(folder: StudyFolder) -> list[str]:
    """The section of a study that sweeps the learning rate of placements and tunes none; empty for any other study."""
    if folder.arm_axes != ("placement",) or not folder.has_sweep or folder.results["tuned"].any():
        return []
    trials = Trials(folder.results, axes=list(folder.axes), scale=folder.scale)
    rows = rows_of(spreads(trials, reference=_REFERENCE, pairs=PAIRS))
    if not rows:
        return []
    headings = [
        "placement",
        "best rate tried:",
        "optimum of a parabola:",
        "loss there, mean ± std over seeds:",
        "seeds:",
        f"less that of {_REFERENCE}, paired:",
        "std of the paired difference:",
        f"difference that {PAIRS} pairs show:",
    ]
    cells = [
        [
            plain(row["placement"]),
            number(row["best_rate"], "g"),
            number(row["optimum"], ".2g") + (" (at the edge)" if row["at_edge"] else ""),
            _with_spread(row["loss"], row["std"]),
            str(row["seeds"]),
            number(row["difference"], "+.3f"),
            number(row["paired_std"], ".3f"),
            number(row["detectable"], ".3f"),
        ]
        for row in rows
    ]
    trained = {row["placement"] for row in rows}
    lost = [str(placement) for placement in trials.values("placement") if placement not in trained]
    return [
        "### What this size can decide",
        table(headings, cells),
        _sentence([row["detectable"] for row in rows], lost),
    ]


def _with_spread(mean: float, std: float) -> str:
    spread = number(std, ".3f")
    return number(mean, ".3f") + ("" if spread == NONE else f" ± {spread}")


def _sentence(detectable: list[float], lost: list[str]) -> str:
    known = sorted(value for value in detectable if math.isfinite(value))
    words = [
        "A difference that pairs show is one that a two-sided t test at 95 % finds nine times in ten.",
        *([f"Here {PAIRS} pairs show {known[0]:.3f} nats at best, {known[-1]:.3f} at worst."] if known else []),
        *([f"At no rate did all seeds of these train: {', '.join(map(plain, lost))}."] if lost else []),
    ]
    return " ".join(words)
