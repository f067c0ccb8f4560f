"""Every layer's gradient norm before clipping, for Trainer and for TRL's trainers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.training.monitor.experts import ExpertBalance
from lamina.training.monitor.guard import DivergenceGuard
from lamina.training.monitor.parameter_measures import GradientNorms, is_recorded
from lamina.training.monitor.rows import Evaluation, Row
from lamina.training.monitor.step_series import StepSeries

Norm = Any
"""A gradient norm in Trainer: a tensor, a DTensor or a number, depending on the device and accelerate's version."""
_Trainer = Trainer if TYPE_CHECKING else object  # a mixin: the class that uses it chooses the trainer


class LayerGradNorms(_Trainer):
    """A mixin for Trainer and TRL's trainers: per-layer gradient norms before clipping, checked by the guard.

    Trainer's own hook before the optimizer step runs after clipping, hence the two overridden methods.
    """

    guard: DivergenceGuard
    layer_rows: list[Row]
    gradient_norms: GradientNorms | None
    series: StepSeries | None = None
    experts: ExpertBalance | None = None
    evaluation: Evaluation = Evaluation()  # the last one; the recorder sets step and loss
    overflows: int = 0
    overflows_in_a_row: int = 0

    def _clip_grad_norm(self, model: nn.Module) -> Norm:
        squares = self._squares()  # before clipping: a norm that is not finite would spoil every layer's gradient
        norm = _whole(super()._clip_grad_norm(model))
        self._check(norm, squares)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> Norm:
        if grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)
        squares = self._squares()  # without clipping, Trainer calls only this method
        norm = _whole(super()._get_grad_norm(model))
        self._check(norm, squares)
        return norm

    def _squares(self) -> torch.Tensor:
        if self.gradient_norms is None:
            self.gradient_norms = GradientNorms(self.bare_model())
        squares = self.gradient_norms.squares()
        if (scaler := self.scaler()) is not None:  # the gradients are still those of the scaled loss
            squares = squares / scaler.scale(torch.ones((), device=squares.device)) ** 2
        return squares

    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16 training, if there is one."""
        return getattr(self.accelerator, "scaler", None)

    def count_overflow(self) -> None:
        """After a step: count it if the loss scaler skipped it because of an overflow, and end it in the series."""
        skipped = self.scaler() is not None and bool(self.accelerator.optimizer_step_was_skipped)
        self.overflows += skipped
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if skipped else 0
        if self.series is not None:
            self.series.end_step(self.state.global_step, skipped=skipped)

    def _check(self, norm: Norm, squares: torch.Tensor) -> None:
        if self.series is not None:
            self.series.add_norm(norm)
        step = self.state.global_step + 1
        recorded = is_recorded(step, self.args)
        self.layer_rows = []
        if not recorded and squares.device.type != "cpu":
            return  # reading the norm would wait for the device
        value = float(norm)
        if recorded or not math.isfinite(value):
            assert self.gradient_norms is not None
            self.layer_rows = self.gradient_norms.rows(step, squares)
        if not math.isfinite(value) and self.scaler() is not None and self.overflows_in_a_row < self.guard.patience:
            self.layer_rows = []  # the scaler skips the step and halves its scale: nothing has diverged yet
            return
        self.guard.see_gradient(step, value, self.layer_rows)
        self.guard.see_layers(self.layer_rows)

    def continue_records(self) -> None:
        """Called when training begins: a resumed trainer restores what it had collected since its last record."""

    def bare_model(self) -> LaminaForCausalLM:
        """The model without the wrappers of accelerate and DDP."""
        assert self.model is not None
        return self.accelerator.unwrap_model(self.model)


def _whole(norm: Norm) -> Norm:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
