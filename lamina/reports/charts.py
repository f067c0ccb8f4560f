"""Draw lines with error bands in panels, and heat maps that share a color scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from plotly.colors import get_colorscale

from lamina.probes.engine.figures import evenly
from lamina.reports.plotting import Figure, panels
from lamina.reports.records import Frame
from lamina.reports.style import FONT, GREY, Shown, at_least_a_decade, log_scale, log_ticks, polish, rgba

VIRIDIS = get_colorscale("Viridis")
_ACROSS = 3  # panels or maps in a row
_MAX_ROWS, _MAX_COLUMNS = 128, 80  # cells of a heat map
_MAX_POINTS = 4000  # of a line over the steps
Values = Sequence[float | None] | np.ndarray | Frame


@dataclass(frozen=True, kw_only=True)
class Line:
    x: Values
    y: Values
    color: str
    name: str = ""  # the name in the legend, escaped
    data_name: str = ""  # the name in the page's saved data, escaped (default: ``name``)
    notes: Sequence[str] = ()  # a text for each point in the saved data
    group: str | None = None  # the group in the legend, whose lines hide together
    legend: bool | None = None
    width: float | None = 2
    dash: str | None = None  # plotly's name of a dash pattern
    markers: bool = False
    marker: float | None = None  # the size of the markers in pixels
    symbol: str | None = None
    hover: str | None = None  # plotly's template for a point's text, or None for no text
    # the x values, lower edge and upper edge of a band around the line
    band: tuple[Values, Values, Values] | None = None
    opacity: float = 0.14
    customdata: Values | None = None

    def draw(self, figure: Figure, row: int | None = None, col: int | None = None) -> None:
        panel: dict[str, int | None] = {"row": row, "col": col}
        if self.band is not None:
            band(figure, *self.band, rgba(self.color, self.opacity), legendgroup=self.group, **panel)
        figure.add_scatter(
            x=self.x,
            y=self.y,
            mode="lines+markers" if self.markers else "lines",
            line={"color": self.color, "width": self.width} | ({"dash": self.dash} if self.dash else {}),
            marker={"size": self.marker, "symbol": self.symbol},
            name=self.name or None,
            legendgroup=self.group,
            showlegend=self.legend,
            customdata=self.customdata,
            meta=({"line": self.data_name} if self.data_name else {}) | ({"notes": self.notes} if self.notes else {})
            or None,
            hovertemplate=None if self.hover is None else f"{self.hover}<extra></extra>",
            **panel,
        )


def band(
    figure: Figure,
    x: Values,
    low: Values,
    high: Values,
    color: str,
    row: int | None = None,
    col: int | None = None,
    **more: object,
) -> None:
    """Fill the area between two edges. ``more`` sets other properties of plotly's trace."""
    figure.add_scatter(
        x=[*x, *x[::-1]],
        y=[*high, *low[::-1]],
        mode="lines",
        fill="toself",
        fillcolor=color,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        row=row,
        col=col,
        **more,
    )


def line_of(item: Shown, x: Values, y: Values, **more: Any) -> Line:
    """Return a line with the color, dash pattern and name of a placement. ``more`` sets other fields of ``Line``."""
    look = {"color": item.color, "dash": item.dash, "name": item.label, "group": item.label}
    return Line(x=x, y=y, **(look | more))


@dataclass(frozen=True)
class Grid:
    count: int

    @property
    def across(self) -> int:
        return min(_ACROSS, self.count)

    @property
    def down(self) -> int:
        return math.ceil(self.count / self.across)

    def place(self, number: int) -> tuple[int, int]:
        """Return the row and the column of a panel, both counted from 1."""
        return number // self.across + 1, number % self.across + 1

    def lowest(self, number: int) -> bool:
        return number + self.across >= self.count


def in_panels(
    titles: Sequence[str], lines: Iterable[tuple[int, Line]], x: str, y: str, height: int = 430, *, log: bool = False
) -> Figure:
    """Draw lines in a row of panels with one y axis. ``lines`` has pairs of a panel number (from 1) and a line."""
    figure = panels(1, len(titles), across=0.035, titles=titles, share_y="row")
    for panel, line in lines:
        line.draw(figure, 1, panel)
    figure.update_xaxes(title=x).update_yaxes(title=y, row=1, col=1)
    polish(figure.update_layout(hovermode="x unified"), height)
    if log:
        log_axis(figure)
    return titles_above(figure.update_layout(margin={"t": 84}, legend={"y": 1.1}))


def over_steps(lines_by_title: Mapping[str, Iterable[Line]], height: int) -> Figure | None:
    """Draw lines against the step, with one panel per title. Return None if there are no panels."""
    if not lines_by_title:
        return None
    figure = panels(1, len(lines_by_title), across=0.08)
    for number, (title, lines) in enumerate(lines_by_title.items(), start=1):
        heights = set[float | None]()
        for line in lines:
            line.draw(figure, 1, number)
            heights.update(line.y)
        level = len(heights) == 1  # plotly would draw a learning rate of 1e-3 at 0, between -1 and 1
        figure.update_yaxes(title=title, rangemode="tozero" if level else None, row=1, col=number)
    return polish(figure.update_xaxes(title="step"), height)


def reference(figure: Figure, x: Sequence[float], y: float, name: str) -> None:
    """Draw a dashed horizontal line, with a name in the legend."""
    figure.add_scatter(
        x=list(x),
        y=[y] * len(x),
        mode="lines",
        line={"color": GREY, "width": 1.4, "dash": "dash"},
        name=name,
        hoverinfo="skip",
    )


def against(x: str, y: str, lines: Iterable[Line], height: int = 340, *, unified: bool = False) -> Figure | None:
    """Draw lines against ``x``. Return None if there are no lines. ``unified`` shows all values in one hover text."""
    figure = Figure()
    for line in lines:
        line.draw(figure)
    if not figure.data:
        return None
    figure.update_xaxes(title=x, rangemode="tozero" if x == "tokens" else None).update_yaxes(title=y)
    return polish(figure.update_layout(hovermode="x unified" if unified else None), height)


def log_axis(figure: Figure) -> Figure:
    values = np.concatenate([np.asarray(trace["y"], dtype=float) for trace in figure.data])
    return figure.update_yaxes(type="log", **log_scale(values))


def heat_maps(
    maps: Sequence[tuple[str, Frame]], quantity: str, *, log: bool, upwards: str, rightwards: str = "step"
) -> Figure | None:
    """Draw tables as heat maps with one color scale. ``upwards`` and ``rightwards`` name the rows and the columns."""
    drawn = [(title, cells) for title, table in maps if (cells := _cells(table, log)).shape[1] > 1]
    drawn = [(title, cells) for title, cells in drawn if cells.notna().to_numpy().any()]
    if not drawn:
        return None
    if (most := max(len(table) for _, table in maps)) > _MAX_ROWS:
        upwards = f"{upwards} ({_MAX_ROWS} of {most})"
    grid = Grid(len(drawn))
    height = 196 * grid.down + 84
    titles = [title for title, _ in drawn]
    gap = 34 / max(height - 84, 1)
    figure = panels(grid.down, grid.across, across=0.025, down=gap, titles=titles, share_x=True, share_y="row")
    form = "10^%{z:.2f}" if log else "%{z:.4g}"
    for number, (title, cells) in enumerate(drawn):
        row, col = grid.place(number)
        figure.add_heatmap(
            x=cells.columns.to_numpy(),
            y=cells.index.to_numpy(),
            z=cells.to_numpy(dtype=np.float32),
            coloraxis="coloraxis",
            meta={"log10": log},
            hovertemplate=f"{title}<br>{rightwards} %{{x}}, {upwards} %{{y}}: {form}<extra></extra>",
            row=row,
            col=col,
        )
        if grid.lowest(number):
            figure.update_xaxes(title=rightwards, showticklabels=True, row=row, col=col)
    for row in range(grid.down):
        figure.update_yaxes(title=upwards, row=row + 1, col=1)
    polish(figure, height)
    figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False)
    low, high = np.nanquantile(np.concatenate([cells.to_numpy().ravel() for _, cells in drawn]), [0.01, 0.99])
    bar = color_bar(quantity)
    if log:
        low, high = at_least_a_decade(float(low), float(high))
        bar["tickvals"], bar["ticktext"] = log_ticks(low, high)
    figure.update_layout(
        plot_bgcolor="#f1f3f5",
        margin={"l": 52, "r": 16, "t": 44, "b": 48},
        coloraxis={"colorscale": VIRIDIS, "cmin": low, "cmax": high, "colorbar": bar},
    )
    return titles_above(figure)


def series(values: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return a line's steps and values. A long line keeps only the lowest and the highest value of every few steps."""
    steps = np.array(sorted(values), int)
    heights = np.array([values[step] for step in steps.tolist()], float)
    if len(steps) <= _MAX_POINTS:
        return steps, heights
    known = np.where(np.isnan(heights), 0, heights)
    few = np.array_split(np.arange(len(steps)), _MAX_POINTS // 2)
    at = sorted({int(part[end(known[part])]) for part in few for end in (np.argmin, np.argmax)})
    return steps[at], heights[at]


def color_bar(title: str) -> dict[str, object]:
    return {
        "title": {"text": title, "side": "right", "font": {"size": 12, "color": GREY, "family": FONT}},
        "tickfont": {"size": 12, "color": GREY},
        "thickness": 12,
        "outlinewidth": 0,
        "x": 1.012,
    }


def titles_above(figure: Figure) -> Figure:
    return figure.update_annotations(font={"size": 13, "family": FONT}, yshift=2)


def _cells(table: Frame, log: bool) -> Frame:
    """Reduce a table to the size of a heat map. A value that is not finite becomes NaN."""
    if table.empty:
        return table
    cells = table.iloc[evenly(len(table), _MAX_ROWS), evenly(table.shape[1], _MAX_COLUMNS)]
    cells = cells.where(np.isfinite(cells))
    cells = np.log10(cells.where(cells > 0)) if log else cells
    return cells.dropna(how="all", axis=1)
