"""Figures by layer: gradient norm and hidden variance from the first block to the last, at both ends of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lamina.reports import charts
from lamina.reports.charts import Line
from lamina.reports.records import Frame, Trial
from lamina.reports.style import Shown, polish

Table = Callable[[Trial], Frame]


def gradients(trial: Trial) -> Frame:
    """The gradient norm of each block: one row per block, one column per step."""
    return trial.gradients


def variances(trial: Trial) -> Frame:
    """The variance of each block's output: one row per block (0: the embedding), one column per step."""
    return trial.variances


def over_seeds(item: Shown, table: Table, *, log: bool = True) -> Frame:
    """The geometric mean over a placement's seeds (else the mean), for the steps that all of them logged."""
    tables = [t for trial in item.trials if not (t := table(trial)).empty]
    if len(tables) < 2:
        return tables[0] if tables else pd.DataFrame()
    if (steps := _common_steps(tables)).empty:
        return tables[0]
    if not log:
        return sum((t[steps] for t in tables[1:]), start=tables[0][steps]) / len(tables)
    with np.errstate(divide="ignore"):
        logs = [np.log(t[steps].where(t[steps] > 0)) for t in tables]
    return np.exp(sum(logs[1:], start=logs[0]) / len(logs))


def ends(items: Sequence[Shown], table: Table, quantity: str) -> go.Figure | None:
    """``quantity`` against the layer at the first and at the last logged step, side by side on one logarithmic scale.

    With several seeds: their geometric mean, and the range from the lowest seed to the highest as a band.
    """
    drawn = [(item, [t for trial in item.trials if not (t := table(trial)).empty]) for item in items]
    drawn = [(item, _of_common_steps(tables)) for item, tables in drawn if tables]
    if not drawn:
        return None
    captions = []
    for end, ordinal, column in (("start", "first", 0), ("end", "last", -1)):
        steps = {table.columns[column] for _, tables in drawn for table in tables}
        captions.append(
            f"{end}: step {steps.pop():.0f}" if len(steps) == 1 else f"{end}: each one's {ordinal} logged step"
        )
    figure = charts.side_by_side(captions)
    for item, tables in drawn:
        for panel, column in ((1, 0), (2, -1)):
            _mean_with_range(item, [t.iloc[:, column] for t in tables], legend=panel == 1).draw(figure, 1, panel)
    first = min(int(t.index.min()) for _, tables in drawn for t in tables)
    figure.update_xaxes(title="layer (0: the embedding)" if first == 0 else "layer")
    figure.update_yaxes(type="log")
    figure.update_yaxes(title=quantity, row=1, col=1)
    figure.update_layout(hovermode="x unified")
    charts.log_axis(polish(figure, 430))
    figure.update_layout(margin_t=84, legend_y=1.1)
    return charts.titles_above(figure)


def _of_common_steps(tables: list[Frame]) -> list[Frame]:
    """The seeds' tables at the steps that all of them have; as they are where there is none."""
    steps = _common_steps(tables)
    return tables if steps.empty else [table[steps] for table in tables]


def _common_steps(tables: Sequence[Frame]) -> pd.Index:
    first = tables[0].columns
    return first[[all(step in table.columns for table in tables) for step in first]]


def _mean_with_range(item: Shown, seeds: Sequence[Frame], *, legend: bool) -> Line:
    """The geometric mean over the seeds, and from two on their range as a band."""
    values: Frame = pd.concat(seeds, axis=1)
    values = values.where(np.isfinite(values) & (values > 0))
    mean, band = np.exp(np.log(values).mean(axis=1)), values.dropna()
    several = len(seeds) > 1
    return Line(
        x=mean.index,
        y=mean.to_numpy(dtype=np.float32),
        band_x=band.index if several else None,
        low=band.min(axis=1) if several else None,
        high=band.max(axis=1) if several else None,
        color=item.color,
        dash=item.dash,
        name=item.label,
        group=item.label,
        legend=legend,
        width=2.2,
        markers=len(mean) <= 16,
        marker=5,
        hover=f"{item.label}: %{{y:.3g}}",
    )


def heat_maps(
    items: Sequence[Shown], table: Table, quantity: str, *, log: bool = True, upwards: str = "layer"
) -> go.Figure | None:
    """``quantity`` by layer (upwards) and step (to the right): one map per placement, one color scale for all."""
    maps = [(item.label, over_seeds(item, table, log=log)) for item in items]
    return charts.heat_maps(maps, quantity, log=log, upwards=upwards)
