"""Objects that behave like a tensor and hold this process's part of a flat parameter."""

from __future__ import annotations

import torch


class HeldPart:
    """The part of a module's parameter that this process holds, as a slice of a flat parameter."""

    def __init__(self, flat: torch.Tensor, path: str, first: int, count: int):
        self.flat, self.path = flat, path
        self._slice = slice(first, first + count)
        self.shape, self.ndim = torch.Size([count]), 1

    @property
    def requires_grad(self) -> bool:
        return self.flat.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def grad(self) -> torch.Tensor | None:
        return None if self.flat.grad is None else self.flat.grad[self._slice]

    def detach(self) -> torch.Tensor:
        return self.flat.detach()[self._slice]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.flat.is_floating_point()

    def of(self, state: torch.Tensor) -> torch.Tensor | None:
        return state[self._slice] if state.shape == self.flat.shape else None


def stored(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that the optimizer updates: the flat parameter of a ``HeldPart``, or the given parameter."""
    return parameter.flat if isinstance(parameter, HeldPart) else parameter


def part_of(parameter: torch.Tensor, state: object) -> torch.Tensor | None:
    """Return an optimizer's state for a parameter, or None if the state has another shape."""
    if not isinstance(state, torch.Tensor):
        return None
    if isinstance(parameter, HeldPart):
        return parameter.of(state)
    return state if state.shape == parameter.shape else None
