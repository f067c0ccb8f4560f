"""Draw a quantity by layer: at the first and the last step, at a few steps, or as a heat map over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from plotly.colors import sample_colorscale

from lamina.probes.engine.figures import evenly
from lamina.reports import charts
from lamina.reports.charts import Grid, Line
from lamina.reports.plotting import Figure, panels
from lamina.reports.records import Frame, Trial
from lamina.reports.style import Shown, polish

_LINES = 7  # steps per panel


@dataclass(frozen=True, kw_only=True)
class Quantity:
    label: str  # the name on the axes
    table: Callable[[Trial], Frame]  # returns a trial's values, one row per layer and one column per step
    by: str = "layer"  # the unit of depth, such as layers
    log: bool = True


def over_seeds(item: Shown, quantity: Quantity) -> Frame:
    """Return the mean over seeds, at the steps that all seeds logged. A logarithmic quantity has a geometric mean."""
    tables = _tables(item, quantity)
    if len(tables) < 2 or any(not table.columns.equals(tables[0].columns) for table in tables):
        return tables[0] if tables else pd.DataFrame()
    layers, arrays = _by_all_layers(tables)
    values = np.stack(arrays)
    if quantity.log:
        values = np.log(np.where(values > 0, values, np.nan))
    mean = values.sum(axis=0) / len(values)
    return pd.DataFrame(np.exp(mean) if quantity.log else mean, index=layers, columns=tables[0].columns)


def _tables(item: Shown, quantity: Quantity) -> list[Frame]:
    """Return each seed's table, at the steps that all seeds logged. If there are no such steps, return whole tables."""
    tables = [table for trial in item.trials if not (table := quantity.table(trial)).empty]
    if all(table.columns.equals(tables[0].columns) for table in tables):
        return tables
    steps = [step for step in tables[0] if all(step in table for table in tables)]
    return [table[steps] for table in tables] if steps else tables


def _by_all_layers(tables: Sequence[Frame]) -> tuple[pd.Index, list[np.ndarray]]:
    """Return the layers that occur in any table, and the values of each table with a row for each of these layers."""
    layers = tables[0].index
    if any(not table.index.equals(layers) for table in tables):
        layers = layers.append([table.index for table in tables[1:]]).unique().sort_values()
        tables = [table.reindex(layers) for table in tables]
    return layers, [table.to_numpy() for table in tables]


def ends(items: Sequence[Shown], quantity: Quantity) -> Figure | None:
    """Draw a quantity against the layer, in one panel for the first and one panel for the last logged step."""
    tables = [(item, pair) for item in items if (pair := _tables(item, quantity))]
    if not tables:
        return None
    captions = []
    for end, ordinal, column in (("start", "first", 0), ("end", "last", -1)):
        steps = {table.columns[column] for _, seeds in tables for table in seeds}
        captions.append(
            f"{end}: step {steps.pop():.0f}" if len(steps) == 1 else f"{end}: the {ordinal} logged step of each run"
        )
    columns, failed = [0, -1], tables[0][0].trials[0].failed
    later = [at for at, step in enumerate(tables[0][1][0].columns) if failed is not None and step >= failed]
    if later and 0 < later[0] < len(tables[0][1][0].columns) - 1:
        columns.insert(1, later[0])
        captions.insert(1, f"went wrong: step {tables[0][1][0].columns[later[0]]:.0f}")
    lines = []
    for item, seeds in tables:
        layers, arrays = _by_all_layers(seeds)
        for panel, column in enumerate(columns, start=1):
            values = pd.DataFrame(np.stack([own[:, column] for own in arrays], axis=1), index=layers)
            lines.append((panel, _mean_with_range(item, values, log=quantity.log, legend=panel == 1)))
    depth = _axis(quantity, [table for _, seeds in tables for table in seeds])
    return charts.in_panels(captions, lines, depth, quantity.label, log=quantity.log)


def _axis(quantity: Quantity, tables: Sequence[Frame]) -> str:
    outside = any(table.index.min() < 0 for table in tables if len(table))
    return f"{quantity.by} (-1: the embedding)" if outside else quantity.by


def _mean_with_range(item: Shown, values: Frame, *, log: bool, legend: bool) -> Line:
    """Draw the mean over the seeds (the columns of ``values``), with a band for the range."""
    values = values.where(np.isfinite(values) & (values > 0)) if log else values.where(np.isfinite(values))
    mean = np.exp(np.log(values).mean(axis=1)) if log else values.mean(axis=1)
    band = values.dropna() if values.shape[1] > 1 else None
    return charts.line_of(
        item,
        mean.index,
        mean.to_numpy(dtype=np.float32),
        band=None if band is None else (band.index, band.min(axis=1), band.max(axis=1)),
        legend=legend,
        width=2.2,
        markers=len(mean) <= 16,
        marker=5,
        hover=f"{item.label}: %{{y:.3g}}",
    )


def heat_maps(items: Sequence[Shown], quantity: Quantity) -> Figure | None:
    """Draw one heat map per placement, with one color scale. The layers go upward, and the steps go to the right."""
    maps = [(item.label, over_seeds(item, quantity)) for item in items]
    upwards = _axis(quantity, [table for _, table in maps])
    return charts.heat_maps(maps, quantity.label, log=quantity.log, upwards=upwards)


def by_steps(items: Sequence[Shown], quantity: Quantity) -> Figure | None:
    """Draw a quantity against the layer, with one panel per placement and one line per step (Peri-LN Fig 1, 6)."""
    tables = [(item, table) for item in items if not (table := over_seeds(item, quantity)).empty]
    if not tables:
        return None
    every = sorted({step for _, table in tables for step in table.columns})
    steps = [every[i] for i in evenly(len(every), _LINES)]
    shades = sample_colorscale("Viridis", [0.92 * (1 - i / max(1, len(steps) - 1)) for i in range(len(steps))])
    grid = Grid(len(tables))
    titles = [item.label for item, _ in tables] if len(items) > 1 else []
    gap = 0.16 / grid.down
    figure = panels(grid.down, grid.across, across=0.03, down=gap, titles=titles, share_x=True, share_y="all")
    for number, (_, table) in enumerate(tables):
        row, col = grid.place(number)
        for step, shade in zip(steps, shades, strict=True):
            if step in table:
                Line(
                    x=table.index.to_numpy(),
                    y=table[step].to_numpy(dtype=np.float32),
                    color=str(shade),
                    name=f"step {step:g}",
                    group=str(step),
                    legend=number == 0,
                    markers=len(table) <= 16,
                    marker=5,
                    hover=f"step {step:g}, {quantity.by} %{{x}}: %{{y:.4g}}",
                ).draw(figure, row, col)
        figure.update_yaxes(title=quantity.label if col == 1 else None, row=row, col=col)
        if grid.lowest(number):
            figure.update_xaxes(title=quantity.by, showticklabels=True, row=row, col=col)
    polish(figure, 400 if grid.down == 1 else 220 * grid.down + 90)
    if quantity.log:
        charts.log_axis(figure)
    legend_y = 1.06 if grid.down == 1 else 1 + 0.13 / grid.down
    figure.update_layout(margin={"t": 72 if len(items) > 1 else 52}, legend={"y": legend_y})
    return charts.titles_above(figure)
