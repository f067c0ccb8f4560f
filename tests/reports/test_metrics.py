"""Every metric that the monitor records has its place in the table of metrics, and on the page."""

from html import escape

import pandas as pd
import torch
from training.tiny_experts import moe

from lamina.reports import monitored, updates
from lamina.reports.metrics import METRICS
from lamina.reports.sections import by_depth
from lamina.reports.style import Shown
from lamina.training.monitor.parameter_measures import GradientNorms, UpdateRatios, gain_rows
from lamina.training.monitor.rows import LOSS, NORM
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.monitor.writers import LAYER_COLUMNS


class Trial:
    """Records of a run, as the pages read them."""

    def __init__(self, layers):
        self.layers = layers

    def streams(self, metric):
        from lamina.reports.records import Trial as Real

        return Real.streams(self, metric)

    gradients = property(lambda self: self._real("gradients"))
    variances = property(lambda self: self._real("variances"))

    def _real(self, name):
        from lamina.reports.records import Trial as Real

        return Real.__dict__[name].func(self)


def recorded() -> pd.DataFrame:
    model, ids = moe(), torch.randint(0, 61, (2, 8))
    rows, ratios = [], UpdateRatios(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in (1, 2):
        model(input_ids=ids, labels=ids).loss.backward()
        norms = GradientNorms(model)
        ratios.before_step()
        optimizer.step()
        ratios.after_step([optimizer])
        rows += ratios.rows(step)
        rows += [*norms.rows(step, norms.squares()), *hidden_state_rows(model, ids, step), *gain_rows(model, step)]
        rows += [(step, 1, "feed_forward", "expert", expert, "expert_load", 0.1 + expert) for expert in range(8)]
        rows += [(step, -1, "model", "all", 0, name, 3.0 - step) for name in (LOSS, NORM, "learning_rate")]
        rows += [(step, layer, "attention", "all", 0, "attention_logit", 1.0 + step) for layer in range(2)]
    return pd.DataFrame(rows, columns=list(LAYER_COLUMNS))


def test_every_recorded_metric_is_in_the_table_and_drawn():
    layers = recorded()
    assert set(layers["metric"]) == set(METRICS)
    shown = [Shown(placement="pre_ln", color="#000000", trials=(Trial(layers),))]
    html = "".join(section.html for section in [*by_depth(shown), *updates.sections(shown), *monitored.sections(shown)])
    for name, metric in METRICS.items():
        assert f"<figcaption>{escape(metric.caption)}</figcaption>" in html, name
