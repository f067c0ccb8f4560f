"""Style placements and figures, and put figures into a page.

Each placement has a color, a dash pattern and a marker, so that figures stay readable without color.
"""

from __future__ import annotations

import base64
import gzip
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from lamina.core.json_types import Json
from lamina.probes.engine.figures import evenly
from lamina.reports.plotting import Figure
from lamina.reports.records import Trial

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
INK, GREY, GRID, RULE = "#1f2933", "#66717d", "#edf0f3", "#c9d0d8"

_DASH = 9  # pixels of each color where dashes alternate
TURNS = '<p class="source">If several lines have the same values, their dashes alternate.</p>'


@dataclass(frozen=True)
class Look:
    """The style of a line: a hexadecimal color, and plotly's names for the dash pattern and the marker."""

    color: str
    dash: str = "solid"
    marker: str = "circle"


# Readers with common kinds of color blindness can distinguish these colors (after Okabe and Ito, and Tol).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#882255", "#44aa99", "#999933")

# The first six placements differ by color alone. The others differ only by color, dash and marker together.
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
    "granite": Look("#c0392b", "dash", "triangle-down"),
    "minicpm": Look("#1f78b4", "dot", "triangle-up"),
    "layerscale": Look("#33a02c", "dot", "cross"),
    "rezero": Look("#6a3d9a", "dashdot", "diamond"),
    "skipinit": Look("#b15928", "dashdot", "triangle-up"),
    "muse_spark": Look("#ff7f00", "dashdot", "triangle-down"),
    "gemma2": Look("#17becf", "dashdot", "cross"),
    "gemma3": Look("#e7298a", "dash", "x"),
    "minimax_01": Look("#66a61e", "dash", "star"),
    "doge": Look("#a6761d", "dot", "x"),
    "subln": Look("#7570b3", "dot", "star"),
    "sandwich_depth_scaled": Look("#4d4d4d", "dashdot", "x"),
}
_PAPERS_OWN = 6  # the first looks, which differ by color alone
# axes of whole numbers
_COUNTED = re.compile(r"((first|later) |number .*|distance between the )?(layer|state|head)s?\b")
_OWN = [color for color in PALETTE if color != "#44aa99"]  # for a figure that has no placements


def look(placement: str) -> Look | None:
    """Return the line style of a placement, or None for an unknown placement. Options after the name do not matter."""
    return _LOOKS.get(placement.partition("(")[0].strip())


def looks(placements: Iterable[str]) -> dict[str, Look]:
    """Return the line style of each placement on a page. An unknown placement gets a unique style."""
    names = list(dict.fromkeys(placements))
    needed = {name.partition("(")[0].strip() for name in names}
    styles = [*list(_LOOKS)[_PAPERS_OWN:], *list(_LOOKS)[:_PAPERS_OWN]]
    free = [_LOOKS[name] for name in styles if name not in needed] or list(_LOOKS.values())
    assigned: dict[str, Look] = {}
    taken = 0
    for name in names:
        chosen = look(name)
        if chosen is None or chosen in assigned.values():
            chosen, taken = free[taken % len(free)], taken + 1
        assigned[name] = chosen
    return assigned


def colors(placements: Iterable[str]) -> dict[str, str]:
    """Return a color for each placement. A placement has the same color in every figure of a page."""
    return {name: chosen.color for name, chosen in looks(placements).items()}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A placement in the figures, with its color and the trials at its best learning rate."""

    placement: str
    color: str
    trials: tuple[Trial, ...]
    status_text: str = ""

    @property
    def label(self) -> str:
        """Return the placement's name, cut after 41 characters, and escaped because plotly reads a few HTML tags."""
        name = self.placement if len(self.placement) <= 42 else f"{self.placement[:41]}…"
        return escape(name)

    @property
    def dash(self) -> str | None:
        placement_look = look(self.placement)
        return None if placement_look is None or placement_look.dash == "solid" else placement_look.dash

    @property
    def marker(self) -> str | None:
        placement_look = look(self.placement)
        return placement_look.marker if placement_look else None


def rgba(color: str, alpha: float) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def polish(figure: Figure, height: int) -> Figure:
    """Give a figure the common style: a white background, thin grid lines, a legend above and ticks at whole layers."""
    figure.update_layout(
        height=height,
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor="#fff",
        plot_bgcolor="#fff",
        margin={"l": 64, "r": 16, "t": 52, "b": 46},
        hoverlabel={"bgcolor": "#fff", "bordercolor": RULE, "font": {"family": FONT, "size": 12.5, "color": INK}},
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "font": {"size": 13}},
    )
    axis = {
        "gridcolor": GRID,
        "linecolor": RULE,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": RULE,
        "ticklen": 4,
        "tickfont": {"size": 12, "color": GREY},
        "title": {"font": {"size": 12.5, "color": GREY, "family": FONT}, "standoff": 8},
        "showline": True,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis, automargin=True)
    for letter, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        if any(_COUNTED.match(str(axis["title"].get("text", ""))) for axis in figure.axes(letter)):
            values = [value for trace in figure.data for value in trace.get(letter, ())]
            if values and all(isinstance(value, int | float | np.number) and math.isfinite(value) for value in values):
                span = float(max(values)) - float(min(values))
                if span <= 12 * 128:
                    update(dtick=next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if span <= 12 * step))
    return figure


def polish_own(figure: Figure) -> Figure:
    """Style a figure that has its own size and title. The page prints the title above the figure."""
    layout, traces = figure.layout, figure.data
    legends = sum(trace.get("showlegend") is not False and bool(trace.get("name")) for trace in traces)
    bottom, top = (layout.get("margin", {}).get(side) for side in "bt")
    polish(figure, layout.get("height") or 400)
    above = 34 if legends < 2 else 52 + 19 * ((legends - 1) // 4)
    if layout.get("annotations") and top:  # titles of sub-plots stand in the margin
        above = max(top, 44)
    figure.update_layout(template=None, title=None, margin={"b": max(46, bottom or 0), "t": above}, colorway=_OWN)
    if "yaxis2" not in layout and all(trace.get("type", "scatter") in ("scatter", "bar") for trace in traces):
        values = np.concatenate([np.asarray(trace["y"], dtype=float).ravel() for trace in traces if "y" in trace])
        _honest_axis(figure, values[np.isfinite(values)])
    return figure


def _honest_axis(figure: Figure, values: np.ndarray) -> None:
    """Set readable ticks, and an axis range in which nearly constant data look constant."""
    axis = figure.layout["yaxis"]
    if not len(values) or "range" in axis:
        return
    if axis.get("type") == "log":
        figure.update_yaxes(**log_scale(values))
    elif values.min() > 0.5 * values.max() > 0:
        figure.update_yaxes(rangemode="tozero")


def log_scale(values: np.ndarray) -> dict[str, Any]:
    """Return the range (at least a decade) and the ticks of a logarithmic axis, or {} without a positive value."""
    exponents = np.log10(values[np.isfinite(values) & (values > 0)])
    if not len(exponents):
        return {}
    low, high = at_least_a_decade(float(exponents.min()), float(exponents.max()))
    pad = 0.06 * (high - low)
    ticks, texts = log_ticks(low - pad, high + pad)
    return {"range": [low - pad, high + pad], "tickvals": [10**e for e in ticks], "ticktext": texts}


def at_least_a_decade(low: float, high: float) -> tuple[float, float]:
    """Widen a range of exponents to at least a decade, so that noise looks small."""
    missing = max(0.0, 1 - (high - low))
    return low - missing / 2, high + missing / 2


def to_html(figure: Figure) -> str:
    """Return a figure as HTML with compressed data. The page's script unpacks and draws the data."""
    note = TURNS if _uncover(figure) else ""
    data = base64.b64encode(gzip.compress(figure.to_json().encode(), mtime=0)).decode()  # a third of the text's size
    return (
        f'<div class="scroll"><div class="plotly-graph-div" style="height:{figure.layout.get("height", 400)}px"></div>'
        f'<script type="text/plain">{data}</script></div>{note}'
    )


def _uncover(figure: Figure) -> bool:
    """Alternate the dashes of lines that hide each other. Return whether any lines hide each other."""
    panels: dict[tuple[str, str], list[Json]] = {}
    for trace in figure.data:
        width = trace.get("line", {}).get("width", 2)
        if trace.get("type", "scatter") == "scatter" and "lines" in trace.get("mode", "") and width >= 1.5:
            panels.setdefault((trace.get("xaxis", "x"), trace.get("yaxis", "y")), []).append(trace)
    hidden = False
    for (_, name), lines in panels.items():
        axis = figure.layout[f"yaxis{name[1:]}"]
        drawn = [_heights(line.get("y"), log=axis.get("type") == "log") for line in lines]
        finite = np.concatenate(drawn)[np.isfinite(np.concatenate(drawn))]
        near = 0.012 * float(np.ptp(axis.get("range") or (finite if len(finite) else [0])))
        for number, (line, shown) in enumerate(zip(lines, drawn, strict=True)):
            # at least half of the points are closer than 1.2 % of the axis
            hides = [
                len(shown) > 2
                and np.array_equal(line["x"], other["x"])
                and _color(line) != _color(other)
                and np.mean(np.abs(shown - heights) <= near) >= 0.5
                for other, heights in zip(lines, drawn, strict=True)
            ]
            if below := sum(hides[:number]):  # the lines below show through the gaps
                dash, hidden = f"{_DASH * (1 + sum(hides[number:]))}px,{_DASH * below}px", True
                line["line"] = {**line.get("line", {}), "dash": dash}
    return hidden


def single(values: object) -> np.ndarray:
    """Return values as float32, which is precise enough for a page. Values beyond float32's range become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=float).astype(np.float32)


def _color(trace: Json) -> object:
    return trace.get("line", {}).get("color")


def _heights(values: object, *, log: bool) -> np.ndarray:
    """Return the positions of values on the axis. A value that the axis cannot show becomes NaN."""
    heights = np.asarray(() if values is None else values, dtype=float)
    with np.errstate(all="ignore"):
        heights = np.log10(heights) if log else heights
    return np.where(np.isfinite(heights), heights, np.nan)


def thin(columns: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Keep about ``count`` evenly spaced rows of the columns, and always the last row."""
    kept = evenly(len(columns[0]), count)
    return [values[kept] for values in columns]


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Return ticks from 10**low to 10**high, as exponents and texts. A long range has at most one tick per decade."""
    steps = (1, 2, 3, 5, 7) if high - low < 1.2 else (1, 2, 5) if high - low < 2 else (1,)
    every = max(1, math.ceil((high - low) / 9))
    exponents = [
        k + math.log10(m) for k in range(math.floor(low), math.ceil(high) + 1) if k % every == 0 for m in steps
    ]
    visible = [e for e in exponents if low <= e <= high]
    return visible, [_power(e) for e in visible]


def _power(exponent: float) -> str:
    if -3 <= exponent < 4:
        return f"{10**exponent:.4g}"
    whole = math.floor(exponent + 1e-9)
    factor = round(10 ** (exponent - whole))
    return f"10<sup>{whole}</sup>" if factor == 1 else f"{factor}·10<sup>{whole}</sup>"
