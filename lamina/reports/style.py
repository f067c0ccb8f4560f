"""The common style of all figures, and their way into a page."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from dataclasses import dataclass
from html import escape
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go
import plotly.io

from lamina.reports.palette import PALETTE, look
from lamina.reports.records import Frame, Trial

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
INK, GREY, GRID, RULE = "#1f2933", "#66717d", "#edf0f3", "#c9d0d8"

_DASH = 9  # pixels of each color where lines take turns
_TURNS = "Lines of the same values take turns: a dash of each."
_OWN = [color for color in PALETTE if color != "#44aa99"]  # of a figure that colors its lines itself


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A placement as the figures show it: the trials of its best learning rate, in its color."""

    placement: str
    color: str
    trials: tuple[Trial, ...]
    status_text: str = ""

    @property
    def label(self) -> str:
        """The name as plotly takes it: it reads a few HTML tags, so the name is escaped."""
        name = self.placement if len(self.placement) <= 42 else f"{self.placement[:41]}…"
        return escape(name)

    @property
    def dash(self) -> str | None:
        """The pattern of its lines; None for a solid one."""
        own = look(self.placement)
        return None if own is None or own.dash == "solid" else own.dash


def rgba(color: str, alpha: float) -> str:
    """A hexadecimal color with transparency."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def polish(figure: go.Figure, height: int) -> go.Figure:
    """The look of every figure: white, thin grid lines, the legend above."""
    figure.update_layout(
        height=height,
        template="none",
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
        "title_font": {"size": 12.5, "color": GREY, "family": FONT},
        "title_standoff": 8,
        "showline": True,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis, automargin=True)
    _whole_layers(figure)
    return figure


def _whole_layers(figure: go.Figure) -> None:
    """Ticks at whole layers on the axes that count them."""
    layout, traces = cast("Any", figure.layout), cast("Any", figure.data)
    for letter in "xy":
        axes = [layout[name] for name in layout if re.fullmatch(f"{letter}axis\\d*", name)]
        if not any(re.match(r"(first )?layer", str(axis.title.text or "")) for axis in axes):
            continue
        values = [value for trace in traces for value in (trace[letter] if trace[letter] is not None else ())]
        counted = [value for value in values if isinstance(value, int | float | np.number) and math.isfinite(value)]
        if len(counted) == len(values) and counted:
            span = float(max(counted)) - float(min(counted))
            every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, math.inf) if span <= 12 * step)
            if math.isfinite(every):
                (figure.update_xaxes if letter == "x" else figure.update_yaxes)(dtick=every)


def polish_own(figure: go.Figure) -> go.Figure:
    """Style a figure that has its own sizes and title; the page sets the title above it."""
    layout, traces = cast("Any", figure.layout), cast("Any", figure.data)
    legends = sum(trace.showlegend is not False and bool(trace.name) for trace in traces)
    bottom, top = layout.margin.b, layout.margin.t
    polish(figure, layout.height or 400)
    above = 34 if legends < 2 else 52 + 19 * ((legends - 1) // 4)
    if layout.annotations and top:  # titles of sub-plots stand in the margin
        above = max(top, 44)
    figure.update_layout(title_text=None, margin_b=max(46, bottom or 0), margin_t=above, colorway=_OWN)
    if "yaxis2" not in layout and all(trace.type in ("scatter", "bar") for trace in traces):
        values = np.concatenate([np.asarray(trace.y, dtype=float).ravel() for trace in traces if trace.y is not None])
        _honest_axis(figure, values[np.isfinite(values)])
    return figure


def _honest_axis(figure: go.Figure, values: np.ndarray) -> None:
    """Set readable ticks, and a range in which level data look level."""
    if not len(values) or cast("Any", figure.layout).yaxis.range is not None:
        return
    if cast("Any", figure.layout).yaxis.type != "log":
        if values.min() > 0.5 * values.max() > 0:
            figure.update_yaxes(rangemode="tozero")
        return
    positive = np.log10(values[values > 0])
    if len(positive):
        low, high = float(positive.min()), float(positive.max())
        missing = max(0.0, 1 - (high - low)) / 2
        pad = missing + 0.06 * max(1.0, high - low)
        exponents, texts = log_ticks(low - pad, high + pad)
        figure.update_yaxes(range=[low - pad, high + pad], tickvals=[10**e for e in exponents], ticktext=texts)


def to_html(figure: go.Figure) -> str:
    """Return the figure's place in a page and its data, which the page's script unpacks and draws."""
    layout = cast("Any", figure.layout)
    note = f'<p class="source">{_TURNS}</p>' if _uncover(figure) else ""
    drawn = json.loads(str(plotly.io.to_json(figure, validate=False)))
    drawn["layout"].pop("template", None)  # Python's defaults, several kilobytes a figure; the look is set above
    text = json.dumps(drawn, separators=(",", ":"))
    data = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()  # a third of the text's size
    return (
        f'<div class="scroll"><div class="plotly-graph-div" style="height:{layout.height or 400}px"></div>'
        f'<script type="text/plain">{data}</script></div>{note}'
    )


def _uncover(figure: go.Figure) -> bool:
    """Dash lines that hide each other in turns, so that each color shows; return whether there were any.

    Two lines of a panel hide each other where half of their points or more are within 1.2 % of the axis.
    """
    layout, panels = cast("Any", figure.layout), {}
    for trace in cast("Any", figure.data):
        if trace.type == "scatter" and "lines" in (trace.mode or "") and (trace.line.width or 2) >= 1.5:
            panels.setdefault((trace.xaxis or "x", trace.yaxis or "y"), []).append(trace)
    found = False
    for (_, name), lines in panels.items():
        axis = layout[f"yaxis{name[1:]}"]
        drawn = [_heights(line.y, log=axis.type == "log") for line in lines]
        finite = np.concatenate(drawn)[np.isfinite(np.concatenate(drawn))]
        near = 0.012 * float(np.ptp(axis.range or (finite if len(finite) else [0])))
        for number, (line, own) in enumerate(zip(lines, drawn, strict=True)):
            hides = [
                len(own) > 2
                and np.array_equal(line.x, other.x)
                and line.line.color != other.line.color
                and np.mean(np.abs(own - heights) <= near) >= 0.5
                for other, heights in zip(lines, drawn, strict=True)
            ]
            if below := sum(hides[:number]):  # what they show stays free
                line.line.dash, found = f"{_DASH * (1 + sum(hides[number:]))}px,{_DASH * below}px", True
    return found


def _heights(values: object, *, log: bool) -> np.ndarray:
    """Return the positions of values on their axis; NaN for those off the axis."""
    heights = np.asarray(() if values is None else values, dtype=float)
    with np.errstate(all="ignore"):
        return np.log10(heights) if log else heights


def thin(frame: Frame, count: int) -> Frame:
    """At most about ``count`` rows, evenly spaced, always including the last."""
    if len(frame) <= count:
        return frame
    rows = sorted({round(i * (len(frame) - 1) / (count - 1)) for i in range(count)})
    return frame.iloc[rows]


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks between two powers of ten, by their exponents: finer within two decades, decades beyond that."""
    steps = (1, 2, 3, 5, 7) if high - low < 1.2 else (1, 2, 5) if high - low < 2 else (1,)
    every = max(1, math.ceil((high - low) / 9))
    exponents = [
        k + math.log10(m) for k in range(math.floor(low), math.ceil(high) + 1) if k % every == 0 for m in steps
    ]
    chosen = [e for e in exponents if low <= e <= high]
    return chosen, [_power(e) for e in chosen]


def _power(exponent: float) -> str:
    if -3 <= exponent < 4:
        return f"{10**exponent:.4g}"
    whole = math.floor(exponent + 1e-9)
    factor = round(10 ** (exponent - whole))
    return f"10<sup>{whole}</sup>" if factor == 1 else f"{factor}·10<sup>{whole}</sup>"
