"""The settings of a watched training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lamina.core.values import path
from lamina.jobs.settings import Settings, above, at_least, not_below, setting
from lamina.training.setting_groups import trackers

OnDivergence = Literal["note", "stop"]


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Settings):
    """What ``lamina.watch`` and ``lamina.LayerMonitor`` take."""

    output: str = setting("runs/watched", "folder of the records and the page", path)
    every: int = setting(20, "steps between two records; losses and gradients are kept for every step", at_least(1))
    layers: str | None = setting(None, "path of the list of layers, if they cannot be found (model.layers)")
    attention: bool = setting(True, "whether to record the largest attention logit and the experts' loads")
    on_divergence: OnDivergence = setting("note", "note a divergence, or stop")
    divergence_margin: float = setting(1.0, "nats above its best at which a loss counts as diverging", not_below(0.0))
    divergence_patience: int = setting(20, "steps that the loss must stay there", at_least(1))
    skip_outliers: float | None = setting(
        None, "standard deviations above the last 128 steps' mean at which a step is skipped (OLMo-core: 6)", above(0.0)
    )
    report_to: str = setting("none", "none, or a comma-separated list of tensorboard, wandb, trackio", trackers)
