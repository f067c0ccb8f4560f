"""The additions to every TRL trainer: checkpoints, order, guard, layer monitor, and no telemetry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers import Trainer

from lamina.core.json_types import Json
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.monitor.recorder import MonitoredTrainer
from lamina.training.monitor.writers import StepSeries
from lamina.training.run import TrainingRun
from lamina.training.trainer import CheckpointedTrainer, OrderedTrainer

_Trainer = Trainer if TYPE_CHECKING else object
Passed: TypeAlias = Any
"""An argument that goes to TRL's trainer, or comes from it, unchanged."""


def trl(name: str) -> Passed:
    """A class or function of TRL by its name. TRL is an extra, and its own overrides differ in their signatures."""
    import trl as library

    return getattr(library, name)


class TunedTrainer(CheckpointedTrainer, OrderedTrainer, MonitoredTrainer, _Trainer):
    """A mixin for TRL's trainers.

    Args:
        run: that the trainer is made for.
        schedule: the share of the peak learning rate by steps done; None for the arguments' own.
    """

    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int = 0

    def __init__(self, *args: Passed, run: TrainingRun, schedule: Callable[[int], float] | None, **kwargs: Passed):
        self.processes, self.guard, self.order, self.states = run.processes, run.guard, run.order, run.states
        self.schedule = schedule
        self.series = StepSeries(self.processes)
        self.layer_rows, self.gradient_norms = [], None
        super().__init__(*args, **kwargs)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would report the model type and the machine of every run."""

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write no card into a checkpoint."""

    def training_step(self, *args: Passed, **kwargs: Passed) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.series.add_loss(loss)
        if loss.device.type == "cpu" and not math.isfinite(value := self.processes.mean(float(loss))):
            self.guard.see_loss(self.state.global_step + 1, value)
        return loss

    def state_dict(self) -> Json:
        """The same as for pretraining, and what TRL has measured since the last record."""
        counts = {"train_tokens": self.tokens_seen, "measured": dict(self._metrics["train"])}
        return {**super().state_dict(), **counts}

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        self._total_train_tokens = int(state.get("train_tokens", 0))
        for name, values in state.get("measured", {}).items():
            self._metrics["train"][name] = list(values)

    @property
    def tokens_seen(self) -> int:
        """The tokens trained on so far, over all processes."""
        return int(self._total_train_tokens)

    def log_held_out(self, metrics: dict[str, float]) -> None:
        """Log an evaluation's numbers as such: in training mode TRL would add its training means, and forget them."""
        model = self.bare_model()
        was_training = model.training
        model.eval()
        try:
            self.log(metrics)
        finally:
            model.train(was_training)

    def bare_model(self) -> Passed:
        """Return the model without the wrappers of accelerate and DDP, with LoRA's matrices in its layers."""
        assert isinstance(self.model, nn.Module)
        return self.accelerator.unwrap_model(self.model)
