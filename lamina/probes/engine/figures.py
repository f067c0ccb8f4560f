"""Draw line charts and heat maps with plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd

from lamina.core.frames import Frame
from lamina.core.text import ranges

if TYPE_CHECKING:
    import plotly.graph_objects as go

Figure: TypeAlias = "go.Figure"
MOST_LINES = 24


def evenly(length: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced positions from 0 to ``length`` - 1, including both ends."""
    count = min(length, most)
    return sorted({round(i * (length - 1) / max(1, count - 1)) for i in range(count)})


def lines(
    frame: pd.DataFrame,
    x: str = "layer",
    y: str = "value",
    *,
    color: str | None = None,
    title: str = "",
    x_title: str = "layer",
    y_title: str = "",
    log_y: bool = False,
    band: str | None = None,
) -> Figure:
    """Draw one line for each value in the column ``color``, with error bars from the column ``band``."""
    import plotly.graph_objects as go

    figure = go.Figure()
    groups = [(None, frame)] if color is None else list(frame.groupby(color, sort=False))
    if len(groups) > MOST_LINES:
        groups = [groups[i] for i in evenly(len(groups), MOST_LINES)]
    part: Frame
    for name, part in groups:
        part = part.sort_values(x)
        error = None
        if band is not None and part[band].notna().any():
            error = {"type": "data", "array": part[band], "thickness": 1, "width": 2}
        figure.add_trace(
            go.Scatter(
                x=part[x],
                y=part[y],
                error_y=error,
                mode="lines+markers" if len(part) <= 64 else "lines",
                marker={"size": 4},
                name="" if name is None else str(name),
                showlegend=name is not None,
            )
        )
    figure.update_layout(title=title, xaxis_title=x_title, yaxis_title=y_title)
    if log_y:
        figure.update_yaxes(type="log", exponentformat="power")
    return figure


def chart(frame: Frame, title: str, y_title: str, caption: str, **axes: Any) -> list[tuple[Figure, str]]:
    """Return a line chart, or nothing for an empty table. The caption lists the values that the chart cannot show."""
    if not len(frame):
        return []
    x, by = axes.get("x", "layer"), axes.get("color")
    infinite = ~np.isfinite(frame["value"])
    low = (frame["value"] <= 0) & ~infinite if axes.get("log_y") else infinite & False
    for what, absent in (("not finite", infinite), ("0 or negative", low)):
        if absent.any():
            names = f" ({', '.join(map(str, frame.loc[absent, by].unique()))})" if by else ""
            at = f"{axes.get('x_title', 'layer')} {ranges(frame.loc[absent, x].dropna())}"
            caption += f" Not drawn: values that are {what}, at {at}{names}."
    return [(lines(frame, title=title, y_title=y_title, **axes), caption)]


def heat_map(
    frame: pd.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    scale: str = "Viridis",
    value_title: str = "",
) -> Figure:
    import plotly.graph_objects as go

    table = frame.pivot_table(index=y, columns=x, values=value, aggfunc="mean")
    figure = go.Figure(
        go.Heatmap(
            x=list(table.columns),
            y=list(table.index),
            z=table.to_numpy(dtype=float),
            hovertemplate=f"{x_title or x} %{{x}}, {y_title or y} %{{y}}: %{{z:.4g}}<extra></extra>",
            colorscale=scale,
            colorbar={"title": value_title},
        )
    )
    figure.update_layout(title=title, xaxis_title=x_title, yaxis_title=y_title)
    return figure
