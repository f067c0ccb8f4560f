"""How far each layer's weights move in a step, how large they are, and the optimizer's moments behind the step.

Updates and first moments rise before gradient and loss do where a run becomes unstable, in some layers before the
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.probes.structure.hooks import Output
from lamina.training.monitor.measure import GradientNorms
from lamina.training.monitor.measured_trainer import is_recorded
from lamina.training.monitor.parameter_owners import own_part
from lamina.training.monitor.rows import Row

MOMENTS = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
"""Metrics, and under which key Adam and its relatives in torch keep them."""


class UpdateRatios(TrainerCallback):
    """Measures each optimizer step of the sub-layers and blocks, of the embedding and of the readout, where recorded.

    w are the weights before the optimizer's step and w' those after it, so that the update is all that the step does:
    clipping, the learning rate and weight decay included. Metrics: ``update_norm`` |w' - w|, ``weight_norm`` |w|,
    ``update_ratio`` |w' - w| / |w|, and where the optimizer has Adam's moments after the step, ``first_moment`` |m| and
    ``second_moment``, the norm of sqrt(v) (both in units of the gradient).

    At a recorded step the weights are held twice between the backward pass and the end of the step; at the others
    nothing is done. Nothing waits for the device before ``rows``.

    Args:
        model: a Lamina model; unless there are ``groups``.
        groups: the parameters by sub-layer.
    """

    def __init__(self, model: nn.Module, groups: GradientNorms | None = None):
        self.groups = GradientNorms(model) if groups is None else groups
        self._before: list[torch.Tensor] = []
        self._sums: dict[str, torch.Tensor] = {}  # by metric: of each group, before the root is taken

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Output
    ) -> None:
        """Trainer calls this right before the optimizer's step."""
        self._sums = {}
        if is_recorded(state.global_step + 1, args):
            self.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Output
    ) -> None:
        """Trainer calls this right after it."""
        self.after_step([kwargs["optimizer"]] if kwargs.get("optimizer") is not None else [])

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep the weights."""
        self._before = [own_part(parameter).clone() for parameter in self.groups.parameters]

    @torch.no_grad()
    def after_step(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Measure, if the weights were kept before the step."""
        if not self._before:
            return
        before, self._before = self._before, []
        sums = {"weight_norm": self.groups.local_sums(before)}
        torch._foreach_sub_(before, [own_part(parameter) for parameter in self.groups.parameters])  # pyright: ignore[reportPrivateImportUsage]
        sums["update_norm"] = self.groups.local_sums(before)
        state = {id(p): values for optimizer in optimizers for p, values in optimizer.state.items()}
        for metric, key in MOMENTS.items():
            moments = [_like(state.get(id(p), {}).get(key), p) for p in self.groups.parameters]
            if any(moment is not None for moment in moments):
                sums[metric] = self.groups.local_sums(moments, power=1 if metric == "second_moment" else 2)
        self._sums = dict(zip(sums, self.groups.over_processes(torch.stack(list(sums.values()))), strict=True))

    def rows(self, step: int) -> list[Row]:
        """The tidy rows of the recorded step, once; none where its update was skipped (by a loss scaler)."""
        if not self._sums:
            return []
        values = dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))
        self._sums = {}
        if not any(values["update_norm"]):
            return []
        rows: list[Row] = []
        for index, (layer, sublayer, role) in enumerate(self.groups.keys):
            rows += _rows(step, layer, sublayer, role, {metric: sums[index] for metric, sums in values.items()})
        for layer in dict.fromkeys(layer for layer, _, _ in self.groups.keys if layer >= 0):
            inside = [index for index, place in enumerate(self.groups.keys) if place[0] == layer]
            rows += _rows(step, layer, "block", "all", {m: sum(v[i] for i in inside) for m, v in values.items()})
        return rows


def _like(moment: object, parameter: torch.Tensor) -> torch.Tensor | None:
    """A moment of a parameter's shape; None for another (an optimizer may compress it)."""
    return moment if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape else None


def _rows(step: int, layer: int, sublayer: str, role: str, sums: dict[str, float]) -> list[Row]:
    """The rows of one group; weights that are all zero (a bias before its first step) have no ratio."""
    rows: list[Row] = [(step, layer, sublayer, role, 0, metric, total**0.5) for metric, total in sums.items()]
    if weight := sums["weight_norm"]:
        rows.append((step, layer, sublayer, role, 0, "update_ratio", (sums["update_norm"] / weight) ** 0.5))
    return rows
