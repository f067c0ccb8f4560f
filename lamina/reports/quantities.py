"""A quantity that the layer monitor recorded: its table by layer and step, and the figures drawn of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from lamina.reports import depth, evolution
from lamina.reports.metrics import Metric
from lamina.reports.page import details, figure
from lamina.reports.records import Frame, Trial, by_depth
from lamina.reports.style import Shown, to_html

SUBLAYERS = ("attention", "feed_forward")


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """One quantity of the monitor as a table by layer (from 1; 0: the embedding) and step."""

    label: str
    metric: str
    sublayer: str | None = None
    role: str | None = None
    index: int | None = None
    log: bool = True
    by: str = "layer"

    def table(self, trial: Trial) -> Frame:
        """One row per layer, one column per step; empty where nothing was recorded."""
        rows = trial.layers
        rows = rows[rows["metric"].eq(self.metric) & rows["layer"].ge(0)]
        for column in ("sublayer", "role", "index"):
            if (value := getattr(self, column)) is not None:
                rows = rows[rows[column] == value]
        return by_depth(rows)


def by_layer(items: Sequence[Shown], metric: Metric, table: depth.Table, heading: str = "") -> str:
    """A metric of whole blocks: by layer at both ends of training, then by layer and step."""
    ends, maps = depth.ends(items, table, metric.quantity), depth.heat_maps(items, table, metric.quantity)
    html = figure(to_html(ends), metric.caption, heading) if ends else ""
    return html + (figure(to_html(maps), metric.over_steps, "" if heading else "Over the steps") if maps else "")


def by_steps(quantities: Iterable[Monitored], items: Sequence[Shown], caption: str) -> str:
    """One figure per quantity that any trial recorded; the caption stands below the last."""
    drawn = [(q, picture) for q in quantities if (picture := evolution.by_steps(items, q)) is not None]
    return "".join(
        figure(to_html(picture), caption if q is drawn[-1][0] else "", q.label[:1].upper() + q.label[1:])
        for q, picture in drawn
    )


def folded(summary: str, quantities: Iterable[Monitored], items: Sequence[Shown], caption: str) -> str:
    html = by_steps(quantities, items, caption)
    return details(summary, html) if html else ""


def words(name: str) -> str:
    return name.replace("feed_forward", "feed-forward").replace("_", " ")


def all_rows(items: Sequence[Shown], metric: str) -> Frame:
    tables = [trial.layers[trial.layers["metric"] == metric] for item in items for trial in item.trials]
    return pd.concat(tables) if tables else pd.DataFrame(columns=["layer", "role", "sublayer"])
