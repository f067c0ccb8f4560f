"""Wrap torch's functions for gradients and process groups, so that the functions notify Lamina of each call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad as torch_clipping

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining import PipelineStage


class Listener(Protocol):
    """An object with methods for wrapped torch functions. ``scales`` and ``tries`` run after the torch function."""

    def differentiates(self, loss: torch.Tensor) -> None: ...

    def scales(self, loss: torch.Tensor, scaled: torch.Tensor) -> None: ...

    def unscales(self) -> None: ...

    def tries(self, optimizer: object) -> None: ...

    def clips(self, parameters: Sequence[torch.Tensor], limit: float | None) -> None: ...

    def divides(self, model: nn.Module, divisor: float) -> None: ...

    def ignores(self, passes: bool) -> None: ...

    def leaves(self) -> None: ...


# Clipping by norm (in torch, accelerate and Trainer) calls the first function. Loops may call the others directly.
_INNER = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")


Telling: TypeAlias = Callable[[Callable[..., object]], Callable[..., object]]
"""A function that wraps a torch function, so that the torch function notifies the listeners."""
_LISTENERS: list[Listener] = []
_PATCHED = ExitStack()  # the wrapped functions, while there are listeners


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the context, notify a listener when torch computes, scales or clips gradients."""
    if not _LISTENERS:
        patches: list[tuple[object, str, Telling]] = [
            *((holder, name, _telling_clip) for holder in (torch_clipping, torch.nn.utils) for name in _INNER),
            *((scaler, "scale", _telling_scale) for scaler in (torch.amp.GradScaler, ShardedGradScaler)),
            (torch.amp.GradScaler, "step", _telling_try),  # ShardedGradScaler inherits it
            *((scaler, "unscale_", _telling_unscale) for scaler in (torch.amp.GradScaler, ShardedGradScaler)),
            (torch.autograd, "backward", _telling_loss),
            (FullyShardedDataParallel, "clip_grad_norm_", _telling_sharded_clip),
            (torch.distributed, "destroy_process_group", _telling_end),
        ]
        if (
            stages := sys.modules.get("torch.distributed.pipelining.stage")
        ) is not None:  # importing the module takes a second
            patches += [
                (stages.PipelineStage, "_compute_outputs", _quiet),
                (stages.PipelineStage, "scale_grads", _telling_division),
            ]
        for holder, name, telling in patches:
            if callable(inner := getattr(holder, name, None)):
                _PATCHED.callback(setattr, holder, name, inner)
                setattr(holder, name, telling(inner))
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
        if not _LISTENERS:
            _PATCHED.close()


def _telling_loss(inner: Callable[..., object]) -> Callable[..., object]:
    @wraps(inner)
    def backward(tensors: object, *args: object, **kwargs: object) -> object:
        loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors  # a stage's is listed
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:  # Tensor.backward comes here
            for listener in tuple(_LISTENERS):
                listener.differentiates(loss)
        return inner(tensors, *args, **kwargs)

    return backward


def _quiet(inner: Callable[..., object]) -> Callable[..., object]:
    """Hide a pipeline stage's shape inference from listeners, because this pass runs on uninitialized memory."""

    @wraps(inner)
    def infer(*args: object, **kwargs: object) -> object:
        for listener in _LISTENERS:
            listener.ignores(True)
        try:
            return inner(*args, **kwargs)
        finally:
            for listener in _LISTENERS:
                listener.ignores(False)

    return infer


def _telling_division(inner: Callable[..., object]) -> Callable[..., object]:
    """Notify listeners that a pipeline stage divides its gradients by the number of micro-batches."""

    @wraps(inner)
    def scale_grads(stage: PipelineStage, divisor: int) -> object:
        for listener in tuple(_LISTENERS):
            listener.divides(stage.submod, divisor)
        return inner(stage, divisor)

    return scale_grads


def _telling_scale(inner: Callable[..., object]) -> Callable[..., object]:
    @wraps(inner)
    def scale(scaler: object, outputs: object) -> object:
        scaled = inner(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
            for listener in tuple(_LISTENERS):
                listener.scales(outputs, scaled)
        return scaled

    return scale


def _telling_try(inner: Callable[..., object]) -> Callable[..., object]:
    @wraps(inner)
    def step(scaler: object, optimizer: object, *args: object, **kwargs: object) -> object:
        result = inner(scaler, optimizer, *args, **kwargs)
        for listener in tuple(_LISTENERS):
            listener.tries(optimizer)
        return result

    return step


def _telling_unscale(inner: Callable[..., object]) -> Callable[..., object]:
    @wraps(inner)
    def unscale_(scaler: object, *args: object, **kwargs: object) -> object:
        for listener in tuple(_LISTENERS):
            listener.unscales()
        return inner(scaler, *args, **kwargs)

    return unscale_


def _telling_sharded_clip(inner: Callable[..., object]) -> Callable[..., object]:
    """Notify listeners of clipping by FSDP1's method, which does not call torch's functions."""

    @wraps(inner)
    def clip_grad_norm_(model: nn.Module, max_norm: float, *args: object, **kwargs: object) -> object:
        for listener in tuple(_LISTENERS):
            listener.clips(list(model.parameters()), float(max_norm))
        return inner(model, max_norm, *args, **kwargs)

    return clip_grad_norm_


def _telling_end(inner: Callable[..., object]) -> Callable[..., object]:
    """Notify listeners just before a loop destroys the process group, so that listeners can still use the group."""

    @wraps(inner)
    def destroy_process_group(group: ProcessGroup | None = None) -> object:
        if group is None or group is torch.distributed.group.WORLD:
            for listener in tuple(_LISTENERS):
                listener.leaves()
        return inner(group)

    return destroy_process_group


def _telling_clip(inner: Callable[..., object]) -> Callable[..., object]:
    signature = inspect.signature(inner)

    def clip(*args: object, **kwargs: object) -> object:
        named = signature.bind(*args, **kwargs).arguments
        parameters, limit = named["parameters"], named.get("max_norm")
        named["parameters"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for listener in tuple(_LISTENERS):
            listener.clips(named["parameters"], limit if isinstance(limit, float | int) else None)
        return inner(**named)

    return clip
