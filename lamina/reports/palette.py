"""The look of each placement in all figures: a color, and a dash and a marker that differ in gray, too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How a line is drawn; dash and marker are plotly's names.

    Attributes:
        color: as hexadecimal.
        dash: the pattern of the line.
        marker: the form of its points.
    """

    color: str
    dash: str = "solid"
    marker: str = "circle"


# Told apart with every common color blindness (after Okabe and Ito, and Tol).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#882255", "#44aa99", "#999933")

# The papers' own have a color each that is safe alone; the others' colors need their dash and marker beside them.
_LOOKS = {
    "pre_ln": Look("#0072b2"),
    "post_ln": Look("#d55e00", marker="square"),
    "fusenorm": Look("#009e73", marker="diamond"),
    "mix_ln": Look("#cc79a7", marker="triangle-up"),
    "keel": Look("#e69f00", marker="triangle-down"),
    "peri_ln": Look("#56b4e9", marker="cross"),
    "deepnorm": Look("#882255", "dash", "square"),
    "sandwich_ln": Look("#332288", "dash", "cross"),
    "hybridnorm": Look("#44aa99", "dash", "diamond"),
    "group_ln": Look("#000000", "dash", "circle"),
    "pre_post_ln": Look("#aa7744", "dash", "triangle-up"),
    "hybridnorm_star": Look("#117733", "dot", "diamond"),
    "olmo2": Look("#999933", "dot", "triangle-down"),
    "admin": Look("#6b7280", "dot", "square"),
    "out_ln": Look("#661100", "dot", "circle"),
    "layernorm_scaling": Look("#88ccee", "dashdot", "circle"),
    "b2t": Look("#aa4499", "dashdot", "square"),
}
_PAPERS_OWN = 6  # of the looks


def look(placement: str) -> Look | None:
    """Return the look of a placement, with or without options; None for an unknown one."""
    return _LOOKS.get(placement.partition("(")[0].strip())


def looks(placements: Iterable[str]) -> dict[str, Look]:
    """Return a look for each placement of a page; unknown ones get looks that the page does not use."""
    names = list(dict.fromkeys(placements))
    needed = {name.partition("(")[0].strip() for name in names}
    known = [*list(_LOOKS)[_PAPERS_OWN:], *list(_LOOKS)[:_PAPERS_OWN]]
    free = [_LOOKS[name] for name in known if name not in needed] or list(_LOOKS.values())
    chosen: dict[str, Look] = {}
    others = 0
    for name in names:
        own = look(name)
        if own is None or own in chosen.values():
            own, others = free[others % len(free)], others + 1
        chosen[name] = own
    return chosen


def colors(placements: Iterable[str]) -> dict[str, str]:
    """One color for each placement, the same in every figure of a page."""
    return {name: chosen.color for name, chosen in looks(placements).items()}
