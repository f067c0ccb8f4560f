"""FSDP1: which part of each parameter this process holds.

FSDP1 keeps the parameters of a unit in a flat one, of which each process has a slice. With ``use_orig_params`` a
module's parameters are views of the slice, which may be empty; without it, only the flat parameter is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import get_world_size, is_initialized
from torch.distributed.fsdp import FullyShardedDataParallel


class HeldPart:
    """This process's part of a module's parameter, inside a flat parameter; used in place of a tensor."""

    def __init__(self, flat: nn.Parameter, path: str, first: int, count: int):
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
        """Return this part of the optimizer's state of the flat parameter; None for one of another shape."""
        return state[self._slice] if state.shape == self.flat.shape else None


def stored(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that an optimizer has: a part's flat one, or the parameter itself."""
    return parameter.flat if isinstance(parameter, HeldPart) else parameter


def part_of(parameter: torch.Tensor, state: object) -> torch.Tensor | None:
    """Return what an optimizer keeps of a parameter, if that has its shape."""
    if not isinstance(state, torch.Tensor):
        return None
    if isinstance(parameter, HeldPart):
        return parameter.of(state)
    return state if state.shape == parameter.shape else None


class FlatParameters:
    """The flat parameters of a model; none if FSDP1 did not wrap it.

    Attributes:
        parts: by the id of a module, its own parameters as parts; empty with ``use_orig_params``.
    """

    def __init__(self, model: nn.Module):
        handles: Iterable[Any] = (module._handle for module in FullyShardedDataParallel.fsdp_modules(model))
        self._handles = [handle for handle in handles if handle is not None]
        self.parts: dict[int, list[torch.Tensor]] = {}
        self._flat: set[int] = set()
        self._shares: dict[int, float] = {}
        world = get_world_size() if is_initialized() else 1
        for handle in self._handles:
            flat: Any = handle.flat_param
            share = (handle.world_size if handle.uses_sharded_strategy else 1) / world
            originals = flat._params if handle._use_orig_params else ()
            self._shares |= dict.fromkeys(map(id, (flat, *originals)), share)
            if handle._use_orig_params:
                continue
            self._flat.add(id(flat))
            described: Any = (flat._param_infos, flat._fqns, flat._shard_param_infos)
            for info, path, shard in zip(*described, strict=True):
                part = HeldPart(flat, path, shard.offset_in_shard or 0, shard.numel_in_shard or 0)
                self.parts.setdefault(id(info.module), []).append(cast(torch.Tensor, part))

    def __bool__(self) -> bool:
        return bool(self._handles)

    def share(self, parameter: torch.Tensor) -> float | None:
        """Return the weight of this process's part in a sum over processes; None for a parameter outside FSDP1."""
        return self._shares.get(id(stored(parameter)))

    def parameters(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield a module's parameters, parts in place of flat ones."""
        yield from (parameter for parameter in module.parameters() if id(parameter) not in self._flat)
        for inner in module.modules() if self.parts else ():
            yield from self.parts.get(id(inner), ())

    def numel(self, model: nn.Module) -> int:
        """Count the elements of a model's parameters on all processes."""
        own = sum(p.numel() for p in model.parameters() if id(p) not in self._shares)
        return own + sum(handle.flat_param._unpadded_unsharded_size.numel() for handle in self._handles)


def is_deepspeeds(model: nn.Module) -> bool:
    """Return whether DeepSpeed's ZeRO keeps a model's gradients and weights elsewhere (it marks the parameters)."""
    return any(hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id") for parameter in model.parameters())


def reshard_root(model: nn.Module) -> None:
    """Reshard what FSDP1 leaves gathered after a forward pass without a backward pass: the root's parameters."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            pass
