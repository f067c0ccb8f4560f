"""What the layer monitor records beside whole blocks' gradients and variances: magnitudes, parts, gains, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lamina.reports import charts, depth, evolution
from lamina.reports.charts import Line
from lamina.reports.page import Section, details, figure
from lamina.reports.records import Frame, Trial, by_depth
from lamina.reports.style import Shown, polish, thin, to_html

FP16_MAX = 65504  # the largest number that float16 holds
SUBLAYERS = ("attention", "feed_forward")
_STEPS = 350  # points of a line over the steps


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """One quantity of the monitor as a table by layer (from 1; 0: the embedding) and step."""

    label: str
    metric: str
    sublayer: str | None = None
    role: str | None = None
    log: bool = True
    by: str = "layer"

    def table(self, trial: Trial) -> Frame:
        """A row a layer, a column a step; empty where nothing was recorded."""
        rows = trial.layers
        rows = rows[rows["metric"].eq(self.metric) & rows["layer"].ge(0)]
        for column in ("sublayer", "role"):
            if (wanted := getattr(self, column)) is not None:
                rows = rows[rows[column] == wanted]
        return by_depth(rows)


def sections(shown: Sequence[Shown]) -> list[Section]:
    """The sections that these trials have records for."""
    made = [_magnitudes(shown), _parts(shown), _gains(shown), _experts(shown)]
    return [section for section in made if section.html]


def largest(shown: Sequence[Shown]) -> go.Figure | None:
    """The band from the 100th largest |x| of the stream to the largest, against the step (Peri-LN Fig 11).

    Over seeds the band goes from the lowest 100th to the highest largest.
    """
    picture = go.Figure()
    for item in shown:
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
            color=item.colour,
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
    picture.update_layout(hovermode="x unified")
    polish(picture, 400)
    return charts.log_axis(picture)


def _band(trial: Trial) -> Frame:
    rows = trial.layers[trial.layers["metric"] == "hidden_top_abs"]
    rows = rows[np.isfinite(rows["value"].astype(float))]
    return rows.groupby("step", as_index=False).agg(low=("value", "min"), high=("value", "max"))


def _magnitudes(shown: Sequence[Shown]) -> Section:
    top = largest(shown)
    html = figure(to_html(top), _TOP, "The 100 largest magnitudes against FP16's limit") if top else ""
    for metric, heading, caption in (
        ("hidden_abs_max", "Largest |x| by layer", _ABS_MAX),
        ("hidden_abs_mean", "Mean |x| by layer", _ABS_MEAN),
    ):
        table, label = _streams(metric), heading.removesuffix(" by layer").lower()
        ends, maps = depth.ends(shown, table, label), depth.heat_maps(shown, table, label)
        html += figure(to_html(ends), caption, heading) if ends else ""
        html += figure(to_html(maps), _OVER_STEPS) if maps else ""
    means = [Monitored(label=f"mean ({_words(s)})", metric="hidden_mean", sublayer=s, log=False) for s in SUBLAYERS]
    html += _folded("Mean of all elements", means, shown, _MEAN)
    return Section(name="Magnitudes", title="Magnitudes of the stream", html=html)


def _streams(metric: str) -> Callable[[Trial], Frame]:
    return lambda trial: trial.streams(metric)


def _parts(shown: Sequence[Shown]) -> Section:
    """Gradients and variances by sub-layer, and the gradients of what is outside the blocks."""
    drawn = [*(("gradient_norm", sub) for sub in SUBLAYERS), ("hidden_variance", "attention")]  # the other: the block's
    parts = [
        Monitored(label=f"{_words(metric)} ({_words(sub)})", metric=metric, sublayer=sub, role="all")
        for metric, sub in drawn
    ]
    html = _folded("Attention and feed-forward", parts, shown, _SUBLAYERS)
    ends = _outside(shown, "gradient_norm", ("embedding", "readout"), "gradient norm", log=True)
    if ends:
        html += details("Embedding and readout", figure(to_html(ends), _EMBEDDING))
    return Section(name="Sub-layers", title="Gradients and variances by sub-layer", html=html)


def _gains(shown: Sequence[Shown]) -> Section:
    rows = _all_rows(shown, "gain_mean")
    inside = rows[rows["layer"].ge(0)]
    places = sorted({(role, sub) for role, sub in zip(inside["role"], inside["sublayer"], strict=True)})
    html = ""
    for metric, name, folded in (("gain_mean", "mean gain", False), ("gain_abs_max", "largest |gain|", True)):
        drawn = [
            Monitored(
                label=f"{name}, {_words(role)} ({_words(sub)})", metric=metric, role=role, sublayer=sub, log=False
            )
            for role, sub in places
        ]
        html += _folded("Largest gains", drawn, shown, _LARGEST_GAINS) if folded else _by_steps(drawn, shown, _GAINS)
    ends = _outside(shown, "gain_mean", ("embedding_norm", "final_norm"), "mean gain", log=False)
    if ends:
        html += details("Embedding's and final norm", figure(to_html(ends), _FINAL))
    return Section(name="Norm gains", title="Norms' gains by layer", html=html)


def _experts(shown: Sequence[Shown]) -> Section:
    if _all_rows(shown, "expert_load").empty:
        return Section(name="Experts", title="Load of the experts", html="")
    maps = depth.heat_maps(shown, _imbalance, "busiest expert's load / balanced load", log=False)
    lines = evolution.by_steps(shown, _Imbalance(label="busiest expert's load / balanced load", metric="expert_load"))
    html = figure(to_html(lines), _IMBALANCE) if lines else ""
    html += figure(to_html(maps), _OVER_STEPS) if maps else ""
    html += "".join(
        details(f"Every expert of {item.placement} at the last step", figure(to_html(drawn), _EXPERTS))
        for item in shown
        if (drawn := _every_expert(item)) is not None
    )
    return Section(name="Experts", title="Load of the experts", html=html)


@dataclass(frozen=True, kw_only=True)
class _Imbalance(Monitored):
    log: bool = False

    def table(self, trial: Trial) -> Frame:
        return _imbalance(trial)


def _imbalance(trial: Trial) -> Frame:
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


def _outside(shown: Sequence[Shown], metric: str, roles: Iterable[str], title: str, *, log: bool) -> go.Figure | None:
    """A metric of what stands outside the blocks against the step: one line for each of these roles."""
    picture = go.Figure()
    for item in shown:
        for role, dash in zip(roles, ("solid", "dot"), strict=True):
            found = [t.layers[t.layers["metric"].eq(metric) & t.layers["layer"].lt(0)] for t in item.trials]
            rows = pd.concat([table[table["role"] == role] for table in found]) if found else pd.DataFrame()
            if rows.empty:
                continue
            values = thin(rows.groupby("step", as_index=False)["value"].mean(), _STEPS)
            Line(
                x=values["step"],
                y=values["value"].to_numpy(dtype=np.float32),
                color=item.colour,
                width=1.8,
                dash=dash,
                name=(f"{item.label}, " if len(shown) > 1 else "") + _words(role),
                hover=f"{item.label}, {_words(role)}: %{{y:.4g}}",
            ).draw(picture)
    if not picture.data:
        return None
    picture.update_xaxes(title="step")
    picture.update_yaxes(title=title)
    polish(picture, 340)
    return charts.log_axis(picture) if log else picture


def _all_rows(shown: Sequence[Shown], metric: str) -> Frame:
    tables = [trial.layers[trial.layers["metric"] == metric] for item in shown for trial in item.trials]
    return pd.concat(tables) if tables else pd.DataFrame(columns=["layer", "role", "sublayer"])


def _by_steps(quantities: Iterable[Monitored], shown: Sequence[Shown], caption: str) -> str:
    """A figure for each quantity that some trial recorded; how to read them stands below the last."""
    drawn = [(q, picture) for q in quantities if (picture := evolution.by_steps(shown, q)) is not None]
    return "".join(
        figure(to_html(picture), caption if q is drawn[-1][0] else "", q.label[:1].upper() + q.label[1:])
        for q, picture in drawn
    )


def _folded(summary: str, quantities: Iterable[Monitored], shown: Sequence[Shown], caption: str) -> str:
    html = _by_steps(quantities, shown, caption)
    return details(summary, html) if html else ""


def _words(name: str) -> str:
    return name.replace("feed_forward", "feed-forward").replace("_", " ")


_TOP = (
    "The 100 largest |x| among all elements of the embedded tokens and of the streams behind every sub-layer together, "
    "for the monitor's held-out blocks (Peri-LN, Figure 11): the line is the largest, the band reaches down to the "
    "100th. Measured in float32, so that a value above the dashed line is seen; in FP16 it would be infinite, in BF16 "
    "it still has a number."
)
_ABS_MAX = (
    "Largest magnitude of the stream behind each block. A step upwards at one layer that all later layers keep is a "
    "massive activation: it came from that layer."
)
_ABS_MEAN = "Mean magnitude of the stream behind each block. Far below the largest one, few channels hold the stream."
_OVER_STEPS = "The same at every record: layers upwards, steps to the right."
_MEAN = (
    "Mean of all elements of the stream behind the sub-layer, from the first record (light) to the last (dark). "
    "LayerNorm takes each token's mean away and RMSNorm leaves it; far from zero against the mean |x|, the two differ."
)
_SUBLAYERS = (
    "The same as by block, for each sub-layer: the norm of the gradient of its parameters before clipping, and the "
    "variance of the stream behind the attention (behind the feed-forward it is the block's); from the first record "
    "(light) to the last (dark)."
)
_EMBEDDING = "Norm of the gradient of the embedding's and the readout's parameters, before clipping, against the step."
_GAINS = (
    "Mean gain of each norm and mean of each learned scale (skip scale, pre scale) against the depth, from the first "
    "record (light) to the last (dark), as in Peri-LN's Figure 9. A norm without a gain has no line."
)
_LARGEST_GAINS = "Largest magnitude of each norm's gain: far above the mean, the norm blows up few channels."
_FINAL = "Mean gain of the embedding's norm and of the final norm against the step."
_IMBALANCE = (
    "Load of each layer's busiest expert over that of a balanced one, from the first record (light) to the last "
    "(dark): 1 is perfect balance, the number of experts over those chosen is a router that always takes the same ones."
)
_EXPERTS = "Each expert's share of its layer's tokens over a balanced share: 1 is balance, 0 an expert never chosen."
