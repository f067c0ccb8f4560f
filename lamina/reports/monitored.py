"""The layer monitor's records besides blocks' gradients and variances: magnitudes, parts, gains, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lamina.reports import charts, experts
from lamina.reports.charts import Line
from lamina.reports.metrics import METRICS
from lamina.reports.page import Section, details, figure
from lamina.reports.quantities import SUBLAYERS, Monitored, all_rows, by_layer, by_steps, folded, words
from lamina.reports.records import Frame, Trial
from lamina.reports.style import Shown, polish, thin, to_html

FP16_MAX = 65504  # the largest number that float16 holds
_STEPS = 350  # points of a line over the steps


def sections(items: Sequence[Shown]) -> list[Section]:
    """The sections for which these trials have records."""
    parts = (_magnitudes, _parts, _logits, _gains, experts.section, _every_step)
    all_sections = [part(items) for part in parts]
    return [section for section in all_sections if section.html]


def largest(items: Sequence[Shown]) -> go.Figure | None:
    """The band from the 100th largest |x| of the stream to the largest, against the step (Peri-LN Fig 11).

    Over seeds the band goes from the lowest 100th to the highest largest.
    """
    picture = go.Figure()
    for item in items:
        bands = [band for trial in item.trials if len(band := _band(trial))]
        if not bands:
            continue
        rows = pd.concat(bands).groupby("step", as_index=False).agg(low=("low", "min"), high=("high", "max"))
        rows = thin(rows, _STEPS)
        steps, low, high = (rows[name].to_numpy(dtype=np.float32) for name in ("step", "low", "high"))
        Line(
            x=steps,
            y=high,
            band_x=steps,
            low=low,
            high=high,
            opacity=0.22,
            color=item.color,
            dash=item.dash,
            name=item.label,
            group=item.label,
            legend=True,
            customdata=low,
            hover=f"{item.label}: %{{customdata:.4g}} to %{{y:.4g}}",
        ).draw(picture)
    if not picture.data:
        return None
    steps = np.concatenate([np.asarray(trace.x, dtype=float) for trace in cast("tuple[go.Scatter, ...]", picture.data)])
    charts.reference(picture, [steps.min(), steps.max()], FP16_MAX, f"FP16's limit, {FP16_MAX:,}")
    picture.update_xaxes(title="step")
    picture.update_yaxes(type="log", title="the 100 largest |x|")
    return charts.log_axis(polish(picture.update_layout(hovermode="x unified"), 400))


def _band(trial: Trial) -> Frame:
    rows = trial.layers[trial.layers["metric"] == "hidden_top_abs"]
    rows = rows[np.isfinite(rows["value"].astype(float))]
    return rows.groupby("step", as_index=False).agg(low=("value", "min"), high=("value", "max"))


def _magnitudes(items: Sequence[Shown]) -> Section:
    top = largest(items)
    metric = METRICS["hidden_top_abs"]
    html = figure(to_html(top), metric.caption, metric.title) if top else ""
    for metric in (METRICS["hidden_abs_max"], METRICS["hidden_abs_mean"]):
        html += by_layer(items, metric, _streams(metric.name), metric.title)
    metric = METRICS["hidden_mean"]
    means = [Monitored(label=f"mean ({words(s)})", metric="hidden_mean", sublayer=s, log=False) for s in SUBLAYERS]
    html += folded(metric.title, means, items, metric.caption)
    return Section(name="Magnitudes", title="Magnitudes of the stream", html=html)


def _streams(metric: str) -> Callable[[Trial], Frame]:
    return lambda trial: trial.streams(metric)


def _parts(items: Sequence[Shown]) -> Section:
    """Gradients and variances by sub-layer, and the gradients of what is outside the blocks."""
    drawn = [*(("gradient_norm", sub) for sub in SUBLAYERS), ("hidden_variance", "attention")]  # the other: the block's
    parts = [
        Monitored(label=f"{words(metric)} ({words(sub)})", metric=metric, sublayer=sub, role="all")
        for metric, sub in drawn
    ]
    html = folded("Attention and feed-forward", parts, items, _SUBLAYERS)
    ends = _outside(items, "gradient_norm", ("embedding", "readout"), "gradient norm", log=True)
    if ends:
        html += details("Embedding and readout", figure(to_html(ends), _EMBEDDING))
    return Section(name="Sub-layers", title="Gradients and variances by sub-layer", html=html)


def _logits(items: Sequence[Shown]) -> Section:
    metric = METRICS["attention_logit"]
    html = by_steps([Monitored(label=metric.quantity, metric=metric.name)], items, metric.caption)
    return Section(name="Attention", title=metric.title, html=html)


def _gains(items: Sequence[Shown]) -> Section:
    rows = all_rows(items, "gain_mean")
    inside = rows[rows["layer"].ge(0)]
    places = sorted(set(inside[["role", "sublayer", "index"]].itertuples(index=False, name=None)))
    html = ""
    for metric in (METRICS["gain_mean"], METRICS["gain_abs_max"]):
        drawn = [
            Monitored(
                label=f"{metric.quantity}, {words(role)}{f' {index + 1:g}' if index else ''} ({words(sub)})",
                metric=metric.name,
                role=role,
                sublayer=sub,
                index=index,
                log=False,
            )
            for role, sub, index in places
        ]
        if metric.name == "gain_mean":
            html += by_steps(drawn, items, metric.caption)
        else:
            html += folded(metric.title, drawn, items, metric.caption)
    ends = _outside(items, "gain_mean", ("embedding_norm", "final_norm"), "mean gain", log=False)
    if ends:
        html += details("Embedding's and final norm", figure(to_html(ends), _FINAL))
    return Section(name="Norm gains", title="Norms' gains by layer", html=html)


def _every_step(items: Sequence[Shown]) -> Section:
    html = ""
    for metric in (METRICS["step_loss"], METRICS["step_gradient_norm"], METRICS["learning_rate"]):
        picture = go.Figure()
        for item in items:
            rows = item.trials[0].layers
            series = _peaks(rows[rows["metric"] == metric.name])
            if len(series):
                Line(
                    x=series.index.to_numpy(),
                    y=series.to_numpy(dtype=np.float32),
                    color=item.color,
                    dash=item.dash,
                    width=1.2,
                    name=item.label,
                    legend=len(items) > 1,
                    hover=f"{item.label}, step %{{x}}: %{{y:.4g}}",
                ).draw(picture)
        if picture.data:
            drawn = polish(picture.update_xaxes(title="step").update_yaxes(title=metric.quantity), 340)
            drawn = charts.log_axis(drawn) if metric.log else drawn
            html += details(metric.title, figure(to_html(drawn), metric.caption))
    return Section(name="Every step", title="Loss and gradient norm of every step", html=html)


def _peaks(rows: Frame) -> Frame:
    """The values by step; if there are too many to draw, the largest of each few, so that every spike is visible."""
    values = rows.groupby("step")["value"].last()
    every = max(1, len(values) // (2 * _STEPS))
    return values if every == 1 else values.groupby(values.index // every * every).max()


def _outside(items: Sequence[Shown], metric: str, roles: Iterable[str], title: str, *, log: bool) -> go.Figure | None:
    """A metric of the parts outside the blocks against the step: one line per role."""
    picture = go.Figure()
    for item in items:
        for role, dash in zip(roles, ("solid", "dot"), strict=True):
            tables = [t.layers[t.layers["metric"].eq(metric) & t.layers["layer"].lt(0)] for t in item.trials]
            rows = pd.concat([table[table["role"] == role] for table in tables]) if tables else pd.DataFrame()
            if rows.empty:
                continue
            values = thin(rows.groupby("step", as_index=False)["value"].mean(), _STEPS)
            Line(
                x=values["step"],
                y=values["value"].to_numpy(dtype=np.float32),
                color=item.color,
                width=1.8,
                dash=dash,
                name=(f"{item.label}, " if len(items) > 1 else "") + words(role),
                hover=f"{item.label}, {words(role)}: %{{y:.4g}}",
            ).draw(picture)
    if not picture.data:
        return None
    picture.update_xaxes(title="step")
    picture.update_yaxes(title=title)
    polish(picture, 340)
    return charts.log_axis(picture) if log else picture


_EMBEDDING = "Norm of the gradient of the embedding's and the readout's parameters, before clipping, against the step."
_FINAL = "Mean gain of the embedding's norm and of the final norm against the step."
_SUBLAYERS = (
    "The same as by block, for each sub-layer: the norm of the gradient of its parameters before clipping, and the "
    "variance of the stream behind the attention (behind the feed-forward it is the block's); from the first record "
    "(light) to the last (dark)."
)
