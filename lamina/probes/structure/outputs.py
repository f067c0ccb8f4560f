"""The arguments and outputs of modules: finding and replacing the tensor that matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

Output: TypeAlias = Any  # of a module: a tensor, a tuple, a list or a ModelOutput
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def first_tensor(output: Output) -> torch.Tensor | None:
    """A module's output tensor: the output itself, or the first tensor in it."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def stream_of(output: Output) -> torch.Tensor:
    """The first tensor of an output that is known to hold one."""
    tensor = first_tensor(output)
    assert tensor is not None
    return tensor


def refill(output: Output) -> Callable[[torch.Tensor], Output]:
    """A function that rebuilds a module's output with another first tensor; it holds all but that tensor."""
    if isinstance(output, torch.Tensor):
        return lambda tensor: tensor
    named = isinstance(output, Mapping)
    keys = list(output) if named else []
    values = [output[key] for key in keys] if named else list(output)
    position = next(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
    values[position] = None
    kind = type(output)

    def make(tensor: torch.Tensor) -> Output:
        refilled = [*values[:position], tensor, *values[position + 1 :]]
        if named:
            return kind(**dict(zip(keys, refilled, strict=True)))
        return kind(*refilled) if hasattr(kind, "_fields") else kind(refilled)

    return make


def argument_of(args: Args, kwargs: Kwargs, place: int | str) -> torch.Tensor:
    """One of a call's arguments, by position or keyword."""
    return args[place] if isinstance(place, int) else kwargs[place]


def with_argument(args: Args, kwargs: Kwargs, place: int | str, value: torch.Tensor) -> tuple[Args, Kwargs]:
    """A call's arguments with another value in one place."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, place: value}
