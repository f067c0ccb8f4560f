"""How far each layer's weights move in a step: the norm of the optimizer's update over the norm of the weights.

The ratio rises before gradient and loss do where a run becomes unstable, in some layers before the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.training.monitoring.gradient_norms import is_recorded
from lamina.training.monitoring.layers import GradientNorms, Row


class UpdateRatios(TrainerCallback):
    """Measures |w' - w| / |w| of each sub-layer and block, of the embedding and of the readout, at recorded steps.

    w are the weights before the optimizer's step and w' those after it, so that the update is all that the step does:
    clipping, the learning rate and weight decay included. At a recorded step the weights are held twice between
    the backward pass and the end of the step; at the others nothing is done. Nothing waits for the device before
    ``rows``.
    """

    def __init__(self, model: PreTrainedModel):
        self.groups = GradientNorms(model)
        self._before: list[torch.Tensor] = []
        self._squares: torch.Tensor | None = None  # [2, groups]: of the update and of the weights

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Trainer calls this right before the optimizer's step."""
        self._squares = None
        if is_recorded(state.global_step + 1, args):
            self.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Trainer calls this right after it."""
        self.after_step()

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep the weights."""
        self._before = [_own(parameter).clone() for parameter in self.groups.parameters]

    @torch.no_grad()
    def after_step(self) -> None:
        """Measure, if the weights were kept before the step."""
        if not self._before:
            return
        before, self._before = self._before, []
        weights = self._sums(before)
        torch._foreach_sub_(before, [_own(parameter) for parameter in self.groups.parameters])  # pyright: ignore[reportPrivateImportUsage]
        self._squares = torch.stack([self._sums(before), weights])

    def rows(self, step: int) -> list[Row]:
        """The tidy rows of the recorded step, once; none where its update was skipped (by a loss scaler)."""
        if self._squares is None:
            return []
        (updates, weights), self._squares = self._squares.tolist(), None
        if not any(updates):
            return []
        blocks: dict[int, tuple[float, float]] = {}
        rows: list[Row] = []
        for (layer, sublayer, role), update, weight in zip(self.groups.keys, updates, weights, strict=True):
            rows += _row(step, layer, sublayer, role, update, weight)
            if layer >= 0:
                total = blocks.get(layer, (0.0, 0.0))
                blocks[layer] = (total[0] + update, total[1] + weight)
        for layer, (update, weight) in blocks.items():
            rows += _row(step, layer, "block", "all", update, weight)
        return rows

    def _sums(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        sums = self.groups.sums(tensors)
        meshes = [p.device_mesh for p in self.groups.parameters if isinstance(p, DTensor)]
        if meshes:  # each process holds a part of every weight
            torch.distributed.all_reduce(sums, group=meshes[0].get_group())
        return sums


def _own(parameter: torch.Tensor | nn.Parameter) -> torch.Tensor:
    """The part of a parameter that this process holds."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _row(step: int, layer: int, sublayer: str, role: str, update: float, weight: float) -> list[Row]:
    """The row of one group; none for weights that are all zero (a bias before its first step), which have no ratio."""
    return [(step, layer, sublayer, role, 0, "update_ratio", (update / weight) ** 0.5)] if weight else []
