"""The load of the experts on the page of a run or study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from lamina.reports import charts, depth, evolution
from lamina.reports.metrics import METRICS
from lamina.reports.page import Section, details, figure
from lamina.reports.quantities import Monitored, all_rows
from lamina.reports.records import Frame, Trial, by_depth
from lamina.reports.style import Shown, polish, to_html

_EXPERTS = "Each expert's share of its layer's tokens over a balanced share: 1 is balance, 0 an expert never chosen."


def section(items: Sequence[Shown]) -> Section:
    """The section of the experts; without content if no trial has any."""
    if all_rows(items, "expert_load").empty:
        return Section(name="Experts", title="Load of the experts", html="")
    metric = METRICS["expert_load"]
    maps = depth.heat_maps(items, imbalance, metric.quantity, log=False)
    lines = evolution.by_steps(items, _Imbalance(label=metric.quantity, metric=metric.name))
    html = figure(to_html(lines), metric.caption) if lines else ""
    html += figure(to_html(maps), metric.over_steps) if maps else ""
    html += "".join(
        details(f"Every expert of {item.placement} at the last step", figure(to_html(drawn), _EXPERTS))
        for item in items
        if (drawn := _every_expert(item)) is not None
    )
    return Section(name="Experts", title="Load of the experts", html=html)


@dataclass(frozen=True, kw_only=True)
class _Imbalance(Monitored):
    log: bool = False

    def table(self, trial: Trial) -> Frame:
        return imbalance(trial)


def imbalance(trial: Trial) -> Frame:
    """Each layer's busiest expert's load over its experts' mean load."""
    rows = trial.layers[trial.layers["metric"] == "expert_load"]
    loads = rows.groupby(["step", "layer"], as_index=False)["value"].agg(["max", "mean"])
    return by_depth(loads.assign(value=loads["max"] / loads["mean"]))


def _every_expert(item: Shown) -> go.Figure | None:
    rows = item.trials[0].layers
    rows = rows[rows["metric"] == "expert_load"]
    if rows.empty:
        return None
    last = rows[rows["step"] == rows["step"].max()]
    table = last.pivot_table(index="layer", columns="index", values="value")
    table = table.div(table.mean(axis=1), axis=0)
    picture = go.Figure(
        go.Heatmap(
            x=table.columns.to_numpy(),
            y=table.index.to_numpy() + 1,
            z=table.to_numpy(dtype=np.float32),
            colorscale="Viridis",
            zmin=0,
            hovertemplate="layer %{y}, expert %{x}: %{z:.2f}<extra></extra>",
            colorbar=charts.color_bar("load / balanced load"),
        )
    )
    picture.update_xaxes(title="expert")
    picture.update_yaxes(title="layer", dtick=1 if len(table) <= 16 else None)
    return polish(picture, max(260, min(560, 140 + 16 * len(table))))
