"""transformers' Trainer with the layer monitor's gradient norms and the divergence guard."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from lamina.training.compiling import uncompiled
from lamina.training.experts import ExpertBalance
from lamina.training.groups import parameter_groups
from lamina.training.guard import DivergenceGuard
from lamina.training.monitor import GradientNorms, Row, hidden_state_rows


class LayerGradNorms:
    """A mixin for Trainer and TRL's trainers: per-layer gradient norms before clipping, and the guard's first look.

    Trainer's own hook before the optimiser step comes after clipping, hence the two overridden methods.
    """

    guard: DivergenceGuard
    layer_rows: list[Row]
    gradient_norms: GradientNorms | None
    state: TrainerState
    args: TrainingArguments

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        squares = self._squares(model)  # clipping by a norm that is not finite would spoil every layer's gradient
        norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        self._look(norm, squares)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        squares = self._squares(model)  # without clipping Trainer calls only this one
        norm = super()._get_grad_norm(model)  # type: ignore[misc]
        self._look(norm, squares)
        return norm

    def _squares(self, model: nn.Module) -> torch.Tensor:
        if self.gradient_norms is None:
            self.gradient_norms = GradientNorms(self._plain(model))
        return self.gradient_norms.squares()

    def _look(self, norm: Any, squares: torch.Tensor) -> None:
        step = self.state.global_step + 1
        recorded = step == 1 or step % max(1, int(self.args.logging_steps)) == 0
        self.layer_rows = []
        if not recorded and squares.device.type != "cpu":
            return  # a look would wait for the device
        value = float(norm)
        if recorded or not math.isfinite(value):
            assert self.gradient_norms is not None
            self.layer_rows = self.gradient_norms.rows(step, squares)
        self.guard.see_gradient(step, value, self.layer_rows)
        self.guard.see_layers(self.layer_rows)

    def _plain(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]


class LaminaTrainer(LayerGradNorms, Trainer):
    """Trainer for pretraining: weight decay on matrices only, every step's loss seen by the guard, experts balanced.

    ``rate_factors`` (of width scaling): each parameter's factor on the learning rate.
    """

    def __init__(
        self,
        *args: Any,
        guard: DivergenceGuard,
        experts: ExpertBalance | None = None,
        rate_factors: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.rate_factors = rate_factors
        self.guard = guard
        self.experts = experts
        if experts is not None:
            self.add_callback(experts)
        self.layer_rows = []
        self.gradient_norms = None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; gains, biases and learned scales do not, whatever their names."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimiser; with width scaling over a group for each role's learning rate."""
        if self.optimizer is None and self.rate_factors is not None:
            whole: Any = self.model if model is None else model
            groups = parameter_groups(
                whole,
                self.rate_factors,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
            )
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            self.optimizer = kind(groups, **options)
        return super().create_optimizer(model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Trainer's own; a mix comes in the order that keeps its shares."""
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(data) if getattr(data, "ordered", False) else super()._get_train_sampler(train_dataset)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's loss; in training with the experts' auxiliary loss, where they are balanced by one."""
        if self.experts is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        sequences = len(inputs["input_ids"])
        with self.experts.watch():
            result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        extra = self.experts.loss(sequences)
        if extra is None:
            return result
        # A loss over the whole step's tokens is not divided by the micro-batches any more: their mean is ours to take.
        if (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func is not None:
            extra = extra / self.current_gradient_accumulation_steps
        return (result[0] + extra, result[1]) if return_outputs else result + extra

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        whole = len(inputs["input_ids"]) == self.args.per_device_train_batch_size
        # An epoch's last batch can be smaller: not worth graphs of its own.
        with nullcontext() if whole else uncompiled(self._plain(model)):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if loss.device.type == "cpu" and not torch.isfinite(loss):
            step = self.state.global_step + 1
            self.layer_rows = hidden_state_rows(self._plain(model), inputs["input_ids"], step)
            self.guard.see_layers(self.layer_rows)
            self.guard.see_loss(step, float(loss))
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Trainer's, uncompiled: evaluations are few, and their batches' shapes several."""
        with uncompiled(self._plain(self.model)):  # type: ignore[arg-type]
            return super().evaluation_loop(*args, **kwargs)
