"""Build a page's sections about the layer monitor's records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from lamina.reports import charts, depth
from lamina.reports.depth import Quantity
from lamina.reports.layer_rows import ByDepth
from lamina.reports.metrics import METRICS, SECTIONS, Metric
from lamina.reports.page import Section, details, figure, sentence, words
from lamina.reports.plotting import Figure
from lamina.reports.records import Frame, Trial, whole_of
from lamina.reports.style import Shown, single

_OPEN = ("Gradients", "Variances")  # sections whose first chart starts open
_POINTS = 350  # of a line over the steps
_DASHES = ("solid", "dot", "dash", "dashdot")
_PARTS = "The charts show this quantity for each sub-layer. The first record is light, and the last record is dark."
_OUTSIDE = "The chart shows this quantity for the embedding and the output head, against the step."
_EXPERTS = (
    "Number of tokens that the router sent to each expert at the last step, divided by the mean number over the "
    "layer's experts. A value of 1 means balance, and 0 means an unused expert."
)
_MISSING = '<p class="none">This folder has no records by layer.</p>'


def sections(items: Sequence[Shown]) -> list[Section]:
    """Return the sections with charts of recorded metrics. Only the first gradient and variance charts start open."""
    html, opened = dict.fromkeys(SECTIONS, ""), dict.fromkeys(SECTIONS, "")
    for metric in METRICS.values():
        known = bool(html[metric.section] or opened[metric.section])
        first, others = _charts(items, metric, metric.title if known else "")
        if metric.section in _OPEN and not known:
            opened[metric.section], first = first, ""
        html[metric.section] += first + others
    made = [
        Section(name, SECTIONS[name], opened[name] + _folded(html[name], more=bool(opened[name])))
        for name in SECTIONS
        if html[name] or opened[name]
    ]
    return made or [Section("Gradients", SECTIONS["Gradients"], _MISSING)]


def _folded(html: str, *, more: bool) -> str:
    count = html.count("<figure>")
    return details(f"{count} {'more ' * more}chart{'s' * (count != 1)}", html)


def blocks(metric: Metric) -> Quantity:
    """Prepare a metric of whole blocks for charts by layer. Layer -1 is the embedding."""
    table = partial(_busiest, metric) if metric.by_index else partial(Trial.blocks, metric=metric.name)
    return Quantity(label=metric.quantity, table=table, log=metric.log)


def _busiest(metric: Metric, trial: Trial) -> Frame:
    """Return the load of each layer's busiest expert, divided by the layer's mean load."""
    rows = trial.layers.of(metric.name)
    values: Frame = rows.groupby(["step", "layer"], as_index=False)["value"].agg(["max", "mean"])
    ratio = (values["max"] / values["mean"]).to_numpy()
    return ByDepth(values["layer"].to_numpy(), values["step"].to_numpy()).table(ratio)


def _charts(items: Sequence[Shown], metric: Metric, heading: str) -> tuple[str, str]:
    """Return a metric's first chart as HTML, and all further charts of this metric."""
    if not any(trial.layers.has(metric.name) for item in items for trial in item.trials):
        return "", ""
    first = whole = ""
    if not metric.folded:
        first = figure(depth.ends(items, blocks(metric)), metric.caption, heading)
        whole = figure(depth.heat_maps(items, blocks(metric)), metric.over_steps, "" if heading else "Over the steps")
    if metric.by_index:
        return first, whole + details("Every expert", figure(_by_index(items, metric), _EXPERTS))
    drawn = bool(first or whole)
    parts = _parts(items, metric, _PARTS if drawn else metric.caption)
    inside = bool(drawn or parts)
    outside = figure(_outside(items, metric), _OUTSIDE if inside else metric.caption, "" if inside else heading)
    if metric.folded:
        return "", details(metric.title, parts + outside)
    parts = details("Attention and feed-forward", parts) if drawn else parts
    return first, whole + parts + (details("Outside the blocks", outside) if inside else outside)


def _parts(items: Sequence[Shown], metric: Metric, caption: str) -> str:
    """Draw a metric by layer at a few steps, with one chart per sub-layer or norm and a caption below the last."""
    whole = {"block"} if metric.folded else whole_of(metric.name)
    places = {place for item in items for trial in item.trials for place in trial.layers.places(metric.name)}
    pictures = []
    for role, sublayer, index in sorted(places):
        if role == "all" and sublayer in whole:
            continue
        name = f"{metric.quantity}, {words(role)}" if role != "all" else metric.quantity
        label = f"{name}{f' {index + 1:g}' if index else ''} ({words(sublayer)})"
        table = partial(_part, metric.name, role, sublayer, index)
        if (chart := depth.by_steps(items, Quantity(label=label, table=table, log=metric.log))) is not None:
            pictures.append((chart, label))
    last = len(pictures) - 1
    return "".join(figure(chart, caption * (i == last), sentence(label)) for i, (chart, label) in enumerate(pictures))


def _part(metric: str, role: str, sublayer: str, index: int, trial: Trial) -> Frame:
    return trial.layers.table(metric, role, (sublayer,), index)


def _outside(items: Sequence[Shown], metric: Metric) -> Figure | None:
    """Draw a metric's largest value outside the blocks against the step, with a band down to the lowest value."""
    lines, steps = [], []
    for item in items:
        found = [trial.layers.outside(metric.name) for trial in item.trials]
        rows = pd.DataFrame({name: np.concatenate([of[name] for of in found]) for name in found[0]})
        for number, (role, values) in enumerate(rows.groupby("role", sort=False)):
            ends = values.groupby("step")["value"].agg(["min", "max"]).reset_index()
            ends = ends.groupby(np.arange(len(ends)) // max(1, len(ends) // _POINTS))
            ends = ends.agg({"step": "first", "min": "min", "max": "max"})
            several = bool((ends["min"] < ends["max"]).any())
            name = ", ".join([item.label] * (len(items) > 1 or role == "all") + [words(str(role))] * (role != "all"))
            at, low, high = ends["step"].to_numpy(), *(single(ends[end]) for end in ("min", "max"))
            lines.append(
                charts.line_of(
                    item,
                    at,
                    high,
                    band=(at, low, high) if several else None,
                    opacity=0.22,
                    width=1.6,
                    dash=item.dash if role == "all" else _DASHES[number % len(_DASHES)],
                    name=name,
                    group=name,
                    legend=len(items) > 1 or role != "all" or metric.limit is not None,
                    customdata=low,
                    hover=f"{name}: %{{y:.4g}}" + (" (down to %{customdata:.4g})" if several else ""),
                )
            )
            steps += [at.min(), at.max()]
    chart = charts.against("step", metric.quantity, lines, unified=True)
    if chart is not None and metric.limit is not None:
        charts.reference(chart, [min(steps), max(steps)], *metric.limit)
    return charts.log_axis(chart) if chart is not None and metric.log else chart


def _by_index(items: Sequence[Shown], metric: Metric) -> Figure | None:
    """Draw one heat map per placement: each expert's load at the last step, divided by the layer's mean load."""
    maps = []
    for item in items:
        rows = item.trials[0].layers.of(metric.name)
        last = rows[rows["step"] == rows["step"].max()]
        table = last.pivot_table(index="layer", columns="index", values="value")
        maps.append((item.label, table.div(table.mean(axis=1), axis=0)))
    return charts.heat_maps(maps, "load / balanced load", log=False, upwards="layer", rightwards="expert")
