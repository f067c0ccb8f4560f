"""Find this process's part of each parameter, and the end of each step, under DeepSpeed's ZeRO 1 to 3.

ZeRO keeps float32 weights, gradients and moments in flat tensors, and each process has a slice of each tensor. ZeRO's
optimizer updates one slice after another with a torch optimizer, so a step ends only when ZeRO's ``step`` ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import get_rank, get_world_size

from lamina.core.json_types import Json
from lamina.modeling.parts import patched
from lamina.training.monitor.held_parts import HeldPart

Zero: TypeAlias = Any
"""ZeRO's optimizer. The type is Any, because DeepSpeed may be missing."""
Marked: TypeAlias = Any
"""A parameter with DeepSpeed's attributes."""


class ZeroPart(HeldPart):
    """This process's part of a parameter: a slice of the float32 weights that ZeRO's optimizer updates.

    Args:
        place: the flat tensor, the slice's first index, and the slice's length.
        gradient: a function that returns the slice's gradient, or None.
        group: the index of the optimizer's group, or -1 for a frozen parameter.
        share: the factor on this process's part in a sum over all processes.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        place: tuple[torch.Tensor, int, int],
        gradient: Callable[[], torch.Tensor | None],
        *,
        group: int,
        share: float = 1.0,
    ):
        super().__init__(place[0], "", *place[1:])
        self.parameter, self.group, self.share, self._gradient = parameter, group, share, gradient

    @property
    def split(self) -> bool:
        """Whether ZeRO also splits the model's own parameter, as stage 3 does."""
        return hasattr(self.parameter, "ds_id")

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    @property
    def grad(self) -> torch.Tensor | None:
        return self._gradient() if self.requires_grad and self.group >= 0 else None


def is_deepspeeds(model: nn.Module) -> bool:
    """Return whether DeepSpeed's ZeRO manages a model's gradients and weights."""
    return any(hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id") for parameter in model.parameters())


def zero_optimizer(model: object, optimizers: Iterable[object]) -> Zero:
    """Find ZeRO's optimizer in an engine or wrapper. Returns None without ZeRO, or if ZeRO's state is on disk."""
    for found in (model, *optimizers):
        while found is not None:
            if hasattr(found, "bit16_groups") or hasattr(found, "fp32_partitioned_groups_flat"):
                return None if getattr(found, "swap_optimizer", False) else found
            found = getattr(found, "optimizer", None)
    return None


def zero_parts(zero: Zero, model: nn.Module) -> dict[int, ZeroPart]:
    """Return this process's part of each parameter, by the parameter's id."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return {id(parameter): _stage_3(zero, parameter) for parameter in model.parameters()}
    flats = zero.single_partition_of_fp32_groups
    groups = zip(zero.bit16_groups, flats, strict=True)
    return {
        id(parameter): _stage_1_or_2(parameter, flat, group)
        for group, (members, flat) in enumerate(groups)
        for parameter in members
    }


def _stage_1_or_2(parameter: Marked, flat: torch.Tensor, group: int) -> ZeroPart:
    mapping = parameter._hp_mapping  # None where another process has all of it
    first = count = 0
    if mapping is not None:
        first, count = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel

    def gradient() -> torch.Tensor | None:
        try:
            return None if mapping is None else mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
        except ValueError:  # the step has freed it
            return None

    return ZeroPart(parameter, (flat, first, count), gradient, group=group)


def _stage_3(zero: Zero, parameter: Marked) -> ZeroPart:
    processes, size = parameter.ds_process_group, parameter.ds_tensor.numel()
    share = get_world_size(processes) / get_world_size()
    count = max(0, min(size, parameter.ds_numel - size * get_rank(processes)))  # padding is behind the last part
    number = zero.get_param_id(parameter)
    if number not in zero.grad_position:
        place = (parameter.ds_tensor, 0, count)
        return ZeroPart(parameter, place, lambda: None, group=-1, share=share)
    sub_group, first, _ = zero.grad_position[number]

    def gradient() -> torch.Tensor:
        return zero._get_fp32_grad_state_partition(parameter, release_swap_buffers=True)[0][:count]

    place = (zero.fp32_partitioned_groups_flat[sub_group], first, count)
    return ZeroPart(parameter, place, gradient, group=zero.sub_group_to_group_id[sub_group], share=share)


class ZeroGroups:
    """The groups and the state of ZeRO's torch optimizer, with one flat tensor per parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Mapping[int, ZeroPart]):
        # stage 3 empties the optimizer's own groups between updates
        self._optimizer, self._parts = optimizer, list(parts.values())

    @property
    def state(self) -> Mapping[torch.Tensor, Json]:
        return self._optimizer.state

    @property
    def param_groups(self) -> list[Json]:
        return [
            {**group, "params": [part.flat for part in self._parts if part.group == number]}
            for number, group in enumerate(self._optimizer.param_groups)
        ]


@contextmanager
def steps_of(zero: Zero, before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """Inside the context, call functions before and after each step of ZeRO's optimizer."""
    step = zero.step

    def telling(*args: object, **kwargs: object) -> object:
        before()
        result = step(*args, **kwargs)
        after()
        return result

    with patched(zero, step=telling):
        yield
