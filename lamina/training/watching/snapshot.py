"""A copy of weights and optimizer states that a run can be put back to, in the memory of the host."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from lamina.training.monitoring.places import own_part


class Snapshot:
    """The parameters, buffers and optimizer states at a step; each process copies what it holds.

    Args:
        step: the last step whose update it includes.
        model: of which.
        optimizers: likewise; learning rates are left to the schedule.
    """

    def __init__(self, step: int, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]):
        self.step = step
        self._tensors = [own_part(tensor).to("cpu", copy=True) for tensor in _tensors(model)]
        self._states = [
            {parameter: {key: _kept(value) for key, value in state.items()} for parameter, state in o.state.items()}
            for o in optimizers
        ]

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Put model and optimizers back."""
        for tensor, kept in zip(_tensors(model), self._tensors, strict=True):
            own_part(tensor).copy_(kept)
        for optimizer, states in zip(optimizers, self._states, strict=True):
            for parameter, state in list(optimizer.state.items()):
                if parameter not in states:
                    del optimizer.state[parameter]  # its first step was later
                    continue
                for key, value in states[parameter].items():
                    if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
                        own_part(state[key]).copy_(value)
                    else:
                        state[key] = copy.deepcopy(value)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _kept(value: object) -> object:
    return own_part(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
