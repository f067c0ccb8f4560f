"""Figures by layer: gradient norm and hidden variance from the first block to the last, at both ends of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lamina.reports.records import Trial
from lamina.reports.style import FONT, GREY, Shown, polish, rgba

_MAX_ROWS, _MAX_COLUMNS = 128, 80  # cells of a heat map
_ACROSS = 3  # heat maps in a row

Table = Callable[[Trial], pd.DataFrame]


def gradients(trial: Trial) -> pd.DataFrame:
    """The gradient norm of each block: a row a block, a column a step."""
    return trial.gradients


def variances(trial: Trial) -> pd.DataFrame:
    """The variance of each block's output: a row a block (0: the embedding), a column a step."""
    return trial.variances


def over_seeds(item: Shown, table: Table) -> pd.DataFrame:
    """The geometric mean over a placement's seeds, for the steps that all of them logged."""
    tables = [t for trial in item.trials if not (t := table(trial)).empty]
    if len(tables) < 2:
        return tables[0] if tables else pd.DataFrame()
    steps = [s for s in tables[0].columns if all(s in t.columns for t in tables)]
    if not steps:
        return tables[0]
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
    names = [_when(tables, 0, "first") for _, tables in drawn], [_when(tables, -1, "last") for _, tables in drawn]
    captions = [f"{end}: step {steps[0]}" if len(set(steps)) == 1 else end for end, steps in _named(names)]
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
    figure.update_yaxes(type="log", exponentformat="power", minor={"showgrid": False})
    figure.update_yaxes(title=quantity, row=1, col=1)
    figure.update_layout(hovermode="x unified")
    polish(figure, 430)
    figure.update_yaxes(dtick=_decades(figure))
    figure.update_layout(margin_t=84, legend_y=1.1)
    return _left_titles(figure)


def heat_maps(shown: Sequence[Shown], table: Table, quantity: str) -> go.Figure | None:
    """``quantity`` by layer (upwards) and step (to the right): one map a placement, one colour scale for all."""
    drawn = [(item, _logarithm(over_seeds(item, table))) for item in shown]
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
            hovertemplate=f"{item.label}<br>step %{{x}}, layer %{{y}}: 10^%{{z:.2f}}<extra></extra>",
            row=number // across + 1,
            col=number % across + 1,
        )
    values = np.concatenate([cells.to_numpy().ravel() for _, cells in drawn])
    low, high = np.nanquantile(values, [0.01, 0.99])
    low, high = (low, high) if high - low > 0.2 else (low - 0.1, high + 0.1)
    ticks = _ticks(low, high)
    polish(figure, height)
    figure.update_layout(
        margin={"l": 52, "r": 16, "t": 44, "b": 48},
        coloraxis={
            "colorscale": "Viridis",
            "cmin": low,
            "cmax": high,
            "colorbar": {
                "title": {"text": quantity, "side": "right", "font": {"size": 12, "color": GREY, "family": FONT}},
                "tickvals": ticks,
                "ticktext": [_power(tick) for tick in ticks],
                "tickfont": {"size": 12, "color": GREY},
                "thickness": 12,
                "outlinewidth": 0,
                "x": 1.012,
            },
        },
    )
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    for number in range(max(0, len(drawn) - across), len(drawn)):
        figure.update_xaxes(title="step", showticklabels=True, row=number // across + 1, col=number % across + 1)
    for row in range(down):
        figure.update_yaxes(title="layer", row=row + 1, col=1)
    return _left_titles(figure)


def _logarithm(table: pd.DataFrame) -> pd.DataFrame:
    if table.empty:
        return table
    rows = sorted({round(i) for i in np.linspace(0, len(table) - 1, min(len(table), _MAX_ROWS))})
    columns = sorted({round(i) for i in np.linspace(0, table.shape[1] - 1, min(table.shape[1], _MAX_COLUMNS))})
    cells = table.iloc[rows, columns]
    cells = np.log10(cells.where(np.isfinite(cells) & (cells > 0)))
    return cells.dropna(how="all", axis=1)


def _when(tables: Sequence[pd.DataFrame], column: int, _: str) -> str:
    return f"{tables[0].columns[column]:.0f}"


def _named(names: tuple[list[str], list[str]]) -> list[tuple[str, list[str]]]:
    return list(zip(("start", "end"), names, strict=True))


def _decades(figure: go.Figure) -> int:
    """How many powers of ten from tick to tick: one, unless the values span more than ten."""
    values = np.concatenate([np.asarray(t.y, dtype=float) for t in figure.data])  # pyright: ignore[reportAttributeAccessIssue]
    values = values[np.isfinite(values) & (values > 0)]
    return max(1, math.ceil((np.log10(values.max()) - np.log10(values.min())) / 8)) if len(values) else 1


def _ticks(low: float, high: float) -> list[float]:
    step = 1.0 if high - low > 2 else 0.5 if high - low > 0.8 else 0.2
    step *= max(1, math.ceil((high - low) / step / 8))
    return [round(tick * step, 3) for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _power(exponent: float) -> str:
    return f"10<sup>{exponent:.0f}</sup>" if exponent == round(exponent) else f"{10**exponent:.2g}"


def _left_titles(figure: go.Figure) -> go.Figure:
    figure.update_annotations(font={"size": 13, "family": FONT}, yshift=2)
    return figure
