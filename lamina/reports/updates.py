"""How far the weights of each layer move in a step, for the pages of runs and studies."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.reports import evolution, quantities
from lamina.reports.metrics import METRICS, Metric
from lamina.reports.page import Section, details, figure
from lamina.reports.quantities import SUBLAYERS, Monitored
from lamina.reports.style import Shown, to_html

METRIC = METRICS["update_ratio"]
_PARTS = "The same for each sub-layer, from the first record (light) to the last (dark)."


def sections(items: Sequence[Shown]) -> list[Section]:
    """The update-to-weight ratios by layer; no section for runs that are older than this record."""
    blocks = Monitored(label=METRIC.quantity, metric=METRIC.name, sublayer="block", role="all")
    html = quantities.by_layer(items, METRIC, blocks.table)
    parts = _by_sublayer(METRIC)
    drawn = [(part, picture) for part in parts if (picture := evolution.by_steps(items, part)) is not None]
    if drawn:
        figures = "".join(figure(to_html(picture), _PARTS, part.label) for part, picture in drawn)
        html += details("Attention and feed-forward", figures)
    for metric in (METRICS[name] for name in ("update_norm", "weight_norm", "first_moment", "second_moment")):
        if figures := quantities.by_steps(_by_sublayer(metric), items, metric.caption):
            html += details(metric.title, figures)
    return [Section(name="Updates", title=METRIC.title, html=html)] if html else []


def _by_sublayer(metric: Metric) -> list[Monitored]:
    names = {sub: f"{metric.quantity} ({sub.replace('_', '-')})" for sub in SUBLAYERS}
    return [Monitored(label=label, metric=metric.name, sublayer=sub, role="all") for sub, label in names.items()]
