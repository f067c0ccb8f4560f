"""Figures by layer: gradient norm and hidden variance from the first block to the last, at both ends of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lamina.reports.records import Frame, Trial
from lamina.reports.style import FONT, GREY, Shown, log_ticks, polish, rgba

_MAX_ROWS, _MAX_COLUMNS = 128, 80  # cells of a heat map
_ACROSS = 3  # heat maps in a row

Table = Callable[[Trial], Frame]


def gradients(trial: Trial) -> Frame:
    """The gradient norm of each block: a row a block, a column a step."""
    return trial.gradients


def variances(trial: Trial) -> Frame:
    """The variance of each block's output: a row a block (0: the embedding), a column a step."""
    return trial.variances


def over_seeds(item: Shown, table: Table, *, log: bool = True) -> Frame:
    """The geometric mean over a placement's seeds (else the mean), for the steps that all of them logged."""
    tables = [t for trial in item.trials if not (t := table(trial)).empty]
    if len(tables) < 2:
        return tables[0] if tables else pd.DataFrame()
    steps = [s for s in tables[0].columns if all(s in t.columns for t in tables)]
    if not steps:
        return tables[0]
    if not log:
        return sum((t[steps] for t in tables[1:]), start=tables[0][steps]) / len(tables)
    with np.errstate(divide="ignore"):
        logs = [np.log(t[steps].where(t[steps] > 0)) for t in tables]
    return np.exp(sum(logs[1:], start=logs[0]) / len(logs))


def ends(shown: Sequence[Shown], table: Table, quantity: str) -> go.Figure | None:
    """``quantity`` against the layer at the first and at the last logged step, side by side on one logarithmic scale.

    With several seeds: their geometric mean, and the range from the lowest seed to the highest as a band.
    """
    drawn = [(item, [t for trial in item.trials if not (t := table(trial)).empty]) for item in shown]
    drawn = [(item, tables) for item, tables in drawn if tables]
    if not drawn:
        return None
    captions = []
    for end, which, column in (("start", "first", 0), ("end", "last", -1)):
        steps = {tables[0].columns[column] for _, tables in drawn}
        captions.append(
            f"{end}: step {steps.pop():.0f}" if len(steps) == 1 else f"{end}: each one's {which} logged step"
        )
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.035, subplot_titles=captions)
    for item, tables in drawn:
        for number, column in ((1, 0), (2, -1)):
            values = pd.concat([t.iloc[:, column] for t in tables], axis=1)
            values = values.where(np.isfinite(values) & (values > 0))
            mean = np.exp(np.log(values).mean(axis=1))
            if len(tables) > 1:
                band = values.dropna()
                figure.add_scatter(
                    x=[*band.index, *band.index[::-1]],
                    y=[*band.max(axis=1), *band.min(axis=1)[::-1]],
                    mode="lines",
                    fill="toself",
                    fillcolor=rgba(item.colour, 0.14),
                    line={"width": 0},
                    hoverinfo="skip",
                    legendgroup=item.label,
                    showlegend=False,
                    row=1,
                    col=number,
                )
            figure.add_scatter(
                x=mean.index,
                y=mean.to_numpy(dtype=np.float32),
                mode="lines" if len(mean) > 16 else "lines+markers",
                line={"color": item.colour, "width": 2.2},
                marker={"size": 5},
                name=item.label,
                legendgroup=item.label,
                showlegend=number == 1,
                hovertemplate=f"{item.label}: %{{y:.3g}}<extra></extra>",
                row=1,
                col=number,
            )
    first = min(int(t.index.min()) for _, tables in drawn for t in tables)
    figure.update_xaxes(title="layer (0: the embedding)" if first == 0 else "layer")
    figure.update_yaxes(type="log")
    figure.update_yaxes(title=quantity, row=1, col=1)
    figure.update_layout(hovermode="x unified")
    polish(figure, 430)
    figure.update_yaxes(**ticks_of(figure))
    figure.update_layout(margin_t=84, legend_y=1.1)
    return _left_titles(figure)


def heat_maps(
    shown: Sequence[Shown], table: Table, quantity: str, *, log: bool = True, upwards: str = "layer"
) -> go.Figure | None:
    """``quantity`` by layer (upwards) and step (to the right): one map a placement, one colour scale for all."""
    drawn = [(item, _cells(over_seeds(item, table, log=log), log)) for item in shown]
    drawn = [(item, cells) for item, cells in drawn if not cells.empty and cells.notna().to_numpy().any()]
    drawn = [(item, cells) for item, cells in drawn if cells.shape[1] > 1]
    if not drawn:
        return None
    across = min(_ACROSS, len(drawn))
    down = math.ceil(len(drawn) / across)
    height = 196 * down + 84
    figure = make_subplots(
        rows=down,
        cols=across,
        shared_yaxes=True,
        shared_xaxes=True,
        horizontal_spacing=0.025,
        vertical_spacing=34 / max(height - 84, 1) if down > 1 else 0,
        subplot_titles=[item.label for item, _ in drawn],
    )
    for number, (item, cells) in enumerate(drawn):
        figure.add_heatmap(
            x=cells.columns.to_numpy(),
            y=cells.index.to_numpy(),
            z=cells.to_numpy(dtype=np.float32),
            coloraxis="coloraxis",
            hovertemplate=f"{item.label}<br>step %{{x}}, {upwards} %{{y}}: "
            + ("10^%{z:.2f}<extra></extra>" if log else "%{z:.4g}<extra></extra>"),
            row=number // across + 1,
            col=number % across + 1,
        )
    values = np.concatenate([cells.to_numpy().ravel() for _, cells in drawn])
    low, high = np.nanquantile(values, [0.01, 0.99])
    ticks, texts = None, None
    if log:
        low, high = _at_least_a_decade(float(low), float(high))
        ticks, texts = log_ticks(low, high)
    for number in range(max(0, len(drawn) - across), len(drawn)):
        figure.update_xaxes(title="step", showticklabels=True, row=number // across + 1, col=number % across + 1)
    for row in range(down):
        figure.update_yaxes(title=upwards, row=row + 1, col=1)
    polish(figure, height)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    figure.update_layout(
        plot_bgcolor="#f1f3f5",
        margin={"l": 52, "r": 16, "t": 44, "b": 48},
        coloraxis={
            "colorscale": "Viridis",
            "cmin": low,
            "cmax": high,
            "colorbar": {
                "title": {"text": quantity, "side": "right", "font": {"size": 12, "color": GREY, "family": FONT}},
                "tickvals": ticks,
                "ticktext": texts,
                "tickfont": {"size": 12, "color": GREY},
                "thickness": 12,
                "outlinewidth": 0,
                "x": 1.012,
            },
        },
    )
    return _left_titles(figure)


def _cells(table: Frame, log: bool) -> Frame:
    if table.empty:
        return table
    rows = sorted({round(i) for i in np.linspace(0, len(table) - 1, min(len(table), _MAX_ROWS))})
    columns = sorted({round(i) for i in np.linspace(0, table.shape[1] - 1, min(table.shape[1], _MAX_COLUMNS))})
    cells = table.iloc[rows, columns]
    cells = cells.where(np.isfinite(cells))
    cells = np.log10(cells.where(cells > 0)) if log else cells
    return cells.dropna(how="all", axis=1)


def ticks_of(figure: go.Figure) -> dict[str, Any]:
    values = np.concatenate([np.asarray(trace["y"], dtype=float) for trace in cast("Any", figure.data)])
    values = np.log10(values[np.isfinite(values) & (values > 0)])
    if not len(values):
        return {}
    low, high = _at_least_a_decade(float(values.min()), float(values.max()))
    pad = 0.06 * (high - low)
    exponents, texts = log_ticks(low - pad, high + pad)
    return {"range": [low - pad, high + pad], "tickvals": [10**e for e in exponents], "ticktext": texts}


def _at_least_a_decade(low: float, high: float) -> tuple[float, float]:
    """Widen a range of exponents, so that noise does not fill the scale as if it were a difference."""
    missing = max(0.0, 1 - (high - low))
    return low - missing / 2, high + missing / 2


def _left_titles(figure: go.Figure) -> go.Figure:
    figure.update_annotations(font={"size": 13, "family": FONT}, yshift=2)
    return figure
