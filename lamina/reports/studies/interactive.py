"""A drawing on a page: with hovering, and lines that a click hides."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lamina.reports import charts
from lamina.reports.charts import Grid
from lamina.reports.studies.drawing import Axis, Drawing, Series
from lamina.reports.style import polish, rgba

_HEIGHT, _MAP = 330, 250  # of a row of panels, in pixels
_TOP = 1.06  # where the marks of points without a seed that trained stand, in heights of the data


def plot(drawing: Drawing) -> go.Figure:
    """The drawing as plotly's figure."""
    grid = Grid(len(drawing.panels))
    figure = make_subplots(
        rows=grid.down,
        cols=grid.across,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=0.26 / grid.down if grid.down > 1 else 0,
        subplot_titles=[escape(panel.title) for panel in drawing.panels],
    )
    named: set[str] = set()
    top = _edge(drawing)
    for number, panel in enumerate(drawing.panels):
        row, col = grid.place(number)
        if panel.cells is not None:
            figure.add_heatmap(
                x=panel.cells.columns, y=panel.cells.rows, z=panel.cells.values, coloraxis="coloraxis", row=row, col=col
            )
        for series in panel.series:
            _draw(figure, drawing, series, top, legend=series.label not in named, row=row, col=col)
            named.add(series.label)
        if grid.lowest(number):
            figure.update_xaxes(title=escape(drawing.x.title), row=row, col=col)
    for row in range(grid.down):
        figure.update_yaxes(title=escape(drawing.y.title), row=row + 1, col=1)
    _scale(figure.update_xaxes, drawing.x)
    _scale(figure.update_yaxes, drawing.y)
    polish(figure, (_MAP if drawing.is_map else _HEIGHT) * grid.down + 90)
    lines = 1 + len(named) // 6
    figure.update_layout(showlegend=drawing.has_legend, margin_t=34 + 22 * lines if drawing.has_legend else 44)
    figure.update_layout(legend_y=1.02 + 0.06 * (grid.down == 1))
    if not drawing.joined:
        figure.update_layout(scattermode="group", scattergap=0.7)
    if drawing.is_map:
        figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": charts.color_bar(drawing.quantity)})
    return charts.titles_above(figure)


def _draw(
    figure: go.Figure, drawing: Drawing, series: Series, top: float | None, *, legend: bool, row: int, col: int
) -> None:
    color, label = series.look.color, escape(series.label)
    place = {"row": row, "col": col, "legendgroup": label}
    band, bars = bool(series.low) and drawing.spread == "band", bool(series.low) and drawing.spread == "bars"
    if band:
        figure.add_scatter(
            x=[*series.x, *series.x[::-1]],
            y=[*series.high, *series.low[::-1]],
            mode="lines",
            fill="toself",
            fillcolor=rgba(color, 0.14),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            **place,
        )
    figure.add_scatter(
        x=series.x or [None],
        y=series.y or [None],
        error_y=_bars(series) if bars else None,
        mode="lines" if len(series.x) > 40 else "lines+markers" if drawing.joined else "markers",
        line={"color": color, "width": 2.2, "dash": series.look.dash},
        marker={"symbol": series.look.marker, "size": 7 if len(series.x) <= 16 else 4, "color": color},
        name=label,
        showlegend=legend,
        hovertemplate=f"{label}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
        **place,
    )
    if series.lost and top is not None:
        figure.add_scatter(
            x=[x for x, _ in series.lost],
            y=[top] * len(series.lost),
            mode="markers",
            marker={"symbol": "x-thin-open", "size": 10, "color": color, "line": {"width": 2, "color": color}},
            customdata=[escape(ended) for _, ended in series.lost],
            hovertemplate=f"{label}<br>%{{x}}: %{{customdata}}<extra></extra>",
            name=label,
            showlegend=False,
            cliponaxis=False,
            **place,
        )


def _bars(series: Series) -> dict[str, object]:
    above = [high - y for high, y in zip(series.high, series.y, strict=True)]
    below = [y - low for low, y in zip(series.low, series.y, strict=True)]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1.1, "width": 3}


def _edge(drawing: Drawing) -> float | None:
    """The height of the marks of what did not train."""
    return top_edge(drawing, _TOP)


def top_edge(drawing: Drawing, reach: float) -> float | None:
    """A height above all points, in heights of the data; None for a figure without points."""
    values = [y for panel in drawing.panels for series in panel.series for y in (*series.y, *series.high)]
    if not values:
        return None
    low, high = min(values), max(values)
    if drawing.y.log and low > 0:
        return high * (high / low) ** (reach - 1)
    return high + (reach - 1) * max(high - low, 0.02 * abs(high), 1e-9)


def _scale(update: object, axis: Axis) -> None:
    assert callable(update)
    texts = any(isinstance(tick, str) for tick in axis.ticks)
    if texts:
        update(type="category", categoryorder="array", categoryarray=list(axis.ticks))
    elif axis.log and axis.ticks:
        update(type="log", tickvals=list(axis.ticks), ticktext=[f"{tick:g}" for tick in axis.ticks])
    elif axis.log:
        update(type="log")
