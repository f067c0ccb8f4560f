"""A drawing on a page: with hovering, and lines that a click hides."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lamina.papers.pages.drawing import LOST_AT, Drawing, Series, Value, marks
from lamina.reports import charts
from lamina.reports.charts import Grid
from lamina.reports.style import polish, rgba

_HEIGHT, _MAP = 330, 250  # of a row of panels, in pixels


def plot(drawing: Drawing) -> go.Figure:
    grid = Grid(len(drawing.panels))
    figure = make_subplots(
        rows=grid.down,
        cols=grid.across,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=0.26 / grid.down if grid.down > 1 else 0,
        subplot_titles=[escape(panel.heading).replace("\n", "<br>") for panel in drawing.panels],
    )
    named: set[str] = set()
    top = drawing.height(LOST_AT)
    for number, panel in enumerate(drawing.panels):
        row, col = grid.place(number)
        if panel.cells is not None:
            figure.add_heatmap(
                x=panel.cells.columns, y=panel.cells.rows, z=panel.cells.values, coloraxis="coloraxis", row=row, col=col
            )
        for place, series in enumerate(panel.series):
            _draw(figure, drawing, series, legend=series.label not in named, row=row, col=col)
            if series.lost and top is not None:
                _lost(figure, series, marks(panel, drawing.x, place), top, row=row, col=col)
            named.add(series.label)
        if grid.lowest(number):
            figure.update_xaxes(title=escape(drawing.x.title), row=row, col=col)
    for row in range(grid.down):
        figure.update_yaxes(title=escape(drawing.y.title), row=row + 1, col=1)
    if drawing.x.has_texts:
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(drawing.x.ticks))
    elif drawing.x.log:
        ticks = list(drawing.x.ticks)
        figure.update_xaxes(type="log")
        if ticks:
            figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    if drawing.y.log:
        charts.log_axis(figure)
    _frame(figure, drawing, grid.down, len(named))
    if not drawing.joined:
        figure.update_layout(scattermode="group", scattergap=0.7)
    if drawing.is_map:
        figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": charts.color_bar(drawing.quantity)})
    return charts.titles_above(figure)


def _frame(figure: go.Figure, drawing: Drawing, down: int, lines: int) -> None:
    """Heights, margins, the legend above the panels' titles, and a range of y that the data fill."""
    inside = (_MAP if drawing.is_map else _HEIGHT) * down
    headings = [panel.heading for panel in drawing.panels]
    titles = 43 if any("\n" in heading for heading in headings) else 26 if any(headings) else 6
    legend = 10 + 22 * (1 + lines // 6) if drawing.has_legend else 10
    below = 46 if all(len(str(tick)) * len(drawing.x.ticks) < 100 for tick in drawing.x.ticks) else 110
    polish(figure, inside + titles + legend + below)
    figure.update_layout(
        showlegend=drawing.has_legend, margin_t=titles + legend, margin_b=below, legend_y=1 + titles / inside
    )
    low, high = drawing.height(-0.05), drawing.height(1.1)
    if not drawing.is_map and not drawing.y.log and low is not None and high is not None:
        figure.update_yaxes(range=[low, high])


def _draw(figure: go.Figure, drawing: Drawing, series: Series, *, legend: bool, row: int, col: int) -> None:
    color, label = series.look.color, escape(series.label)
    where, bars = {"row": row, "col": col, "legendgroup": label}, None
    if series.low and drawing.spread == "bars":
        below, above = series.bars
        bars = {"type": "data", "array": above, "arrayminus": below, "thickness": 1.1, "width": 3}
    elif series.low:
        charts.band(figure, series.x, series.low, series.high, rgba(color, 0.14), **where)
    figure.add_scatter(
        x=series.x or [None],
        y=series.y or [None],
        error_y=bars,
        mode="lines" if len(series.x) > 40 else "lines+markers" if drawing.joined else "markers",
        line={"color": color, "width": 2.2, "dash": series.look.dash},
        marker={"symbol": series.look.marker, "size": 7 if len(series.x) <= 16 else 4, "color": color},
        name=label,
        showlegend=legend,
        hovertemplate=f"{label}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
        **where,
    )


def _lost(figure: go.Figure, series: Series, places: list[Value], top: float, *, row: int, col: int) -> None:
    """Marks along the top edge where no seed trained."""
    color, label = series.look.color, escape(series.label)
    told = [[f"{x:g}" if isinstance(x, float) else escape(str(x)), escape(ended)] for x, ended in series.lost]
    figure.add_scatter(
        x=places,
        y=[top] * len(places),
        mode="markers",
        marker={"symbol": "x-thin-open", "size": 10, "color": color, "line": {"width": 2, "color": color}},
        customdata=told,
        hovertemplate=f"{label}<br>%{{customdata[0]}}: %{{customdata[1]}}<extra></extra>",
        name=label,
        legendgroup=label,
        showlegend=False,
        cliponaxis=False,
        row=row,
        col=col,
    )
