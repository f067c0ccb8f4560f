"""The figure of a sweep: the loss over the learning rate, a U for each placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lamina.reports.palette import looks
from lamina.reports.ranking import by_rate
from lamina.reports.records import Frame
from lamina.reports.style import polish

_MARKERS = {
    "short": "circle-open",
    "stuck": "triangle-up-open",
    "interrupted": "square-open",
    "diverged": "x-thin-open",
    "failed": "cross-open",
}


def u_curves(results: Frame, color: Mapping[str, str], order: Sequence[str]) -> go.Figure | None:
    """Mean eval loss of the finished seeds against the learning rate; unfinished trials stand at the top edge."""
    rates = by_rate(results[np.isfinite(results["learning_rate"])])
    if rates.empty or rates["learning_rate"].nunique() < 2:
        return None
    measured = (rates["finished"] > 0) | (rates["status"].eq("short") & np.isfinite(rates["eval_loss"]))
    rates, measured_rates = rates.assign(measured=measured), rates[measured]
    losses = measured_rates["eval_loss"] if len(measured_rates) else pd.Series([1.0, 2.0])
    reach = max(float(losses.max() - losses.min()), 0.05)
    top = float(losses.max()) + 0.16 * reach
    figure, looks_of = go.Figure(), looks(order)
    for placement in order:
        label = escape(placement)
        rows = rates[rates["placement"] == placement].sort_values("learning_rate")
        fine, lost = rows[rows["measured"]], rows[~rows["measured"]]
        spread = fine["eval_loss_std"].fillna(0)
        figure.add_scatter(
            x=fine["learning_rate"] if len(fine) else [None],
            y=fine["eval_loss"] if len(fine) else [None],
            error_y={"type": "data", "array": spread, "thickness": 1.1, "width": 3} if spread.any() else None,
            mode="lines+markers",
            line={"color": color[placement], "width": 2.2, "dash": looks_of[placement].dash},
            marker={
                "size": [11 if loss == fine["eval_loss"].min() else 7 for loss in fine["eval_loss"]],
                "symbol": looks_of[placement].marker,
            },
            name=label,
            legendgroup=label,
            showlegend=True,
            hovertemplate=f"{label}<br>%{{x}}: %{{y:.3f}}<extra></extra>",
        )
        figure.add_scatter(
            x=lost["learning_rate"] * (1 + 0.035 * (list(order).index(placement) - (len(order) - 1) / 2)),
            y=[top] * len(lost),
            mode="markers",
            marker={
                "symbol": [_MARKERS.get(status, "x-thin-open") for status in lost["status"]],
                "size": 11,
                "color": color[placement],
                "line": {"width": 2.2, "color": color[placement]},
            },
            customdata=lost[["learning_rate", "status_text"]].map(lambda v: escape(str(v))).to_numpy(),
            name=label,
            legendgroup=label,
            showlegend=False,
            cliponaxis=False,
            hovertemplate=f"{label}<br>%{{customdata[0]}}: %{{customdata[1]}}<extra></extra>",
        )
    ticks = sorted(rates["learning_rate"].unique())
    figure.update_xaxes(type="log", title="learning rate", tickvals=ticks, ticktext=[f"{rate:g}" for rate in ticks])
    figure.update_yaxes(title="eval loss", range=[float(losses.min()) - 0.1 * reach, top + 0.04 * reach])
    figure.update_yaxes(showticklabels=len(measured_rates) > 0)
    return polish(figure, 420)
