"""Find the part of each parameter that this process holds under FSDP1 or DeepSpeed's ZeRO.

FSDP1 joins several parameters into one flat parameter, and each process holds a slice of the flat parameter. With
``use_orig_params``, the original parameters are views of this slice, and may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import get_world_size, is_initialized
from torch.distributed.fsdp import FullyShardedDataParallel

from lamina.training.monitor.held_parts import HeldPart, stored
from lamina.training.monitor.zero import ZeroPart, zero_parts


class FlatParameters:
    """The flat parameters of a model under FSDP1 or ZeRO. Other models have none.

    Args:
        zero: ZeRO's optimizer (``zero_optimizer``), if there is one.

    Attributes:
        parts: this process's parts of each module's parameters, by the module's id (empty with ``use_orig_params``).
        zero: this process's part of each parameter under ZeRO, by the parameter's id.
        hidden_by: "FSDP1" or "ZeRO 3" if no process holds whole weights, otherwise "".
    """

    def __init__(self, model: nn.Module, zero: object = None):
        handles: Iterable[Any] = (module._handle for module in FullyShardedDataParallel.fsdp_modules(model))
        self._handles = [handle for handle in handles if handle is not None]
        self.parts: dict[int, list[torch.Tensor]] = {}
        self.zero = {} if zero is None else zero_parts(zero, model)
        splits = any(part.split for part in self.zero.values())
        self.hidden_by = "FSDP1" if self._handles else "ZeRO 3" if splits else ""
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
        return bool(self._handles or self.zero)

    def share(self, parameter: torch.Tensor) -> float | None:
        """Return the factor on this process's part in a sum over all processes, or None if processes hold no parts."""
        if isinstance(parameter, ZeroPart):
            return parameter.share
        return self._shares.get(id(stored(parameter)))

    def parameters(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield a module's parameters. For a flat parameter, yield this process's parts instead."""
        own = (parameter for parameter in module.parameters() if id(parameter) not in self._flat)
        yield from (cast(torch.Tensor, self.zero.get(id(parameter), parameter)) for parameter in own)
        for inner in module.modules() if self.parts else ():
            yield from self.parts.get(id(inner), ())

    def numel(self, model: nn.Module) -> int:
        """Count the elements of a model's parameters over all processes."""
        own = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if id(p) not in self._shares)
        return own + sum(handle.flat_param._unpadded_unsharded_size.numel() for handle in self._handles)


def reshard_root(model: nn.Module) -> None:
    """Reshard the root module's parameters. FSDP1 leaves these parameters gathered after a pass without gradients."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            pass
