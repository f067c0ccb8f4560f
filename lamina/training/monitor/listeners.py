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
        unscaled = _after(lambda listener, *args, **kwargs: listener.unscales())
        tried = _after(lambda listener, result, scaler, optimizer, *args, **kwargs: listener.tries(optimizer))
        clipped = _before(
            lambda listener, model, max_norm, *_, **__: listener.clips([*model.parameters()], float(max_norm))
        )
        divided = _before(lambda listener, stage, divisor: listener.divides(stage.submod, divisor))
        scalers = (torch.amp.GradScaler, ShardedGradScaler)
        patches: list[tuple[object, str, Telling]] = [
            *((holder, name, _clipping) for holder in (torch_clipping, torch.nn.utils) for name in _INNER),
            *((scaler, "scale", _after(_scaled)) for scaler in scalers),
            (torch.amp.GradScaler, "step", tried),  # ShardedGradScaler inherits it
            *((scaler, "unscale_", unscaled) for scaler in scalers),
            (torch.autograd, "backward", _before(_differentiated)),
            (FullyShardedDataParallel, "clip_grad_norm_", clipped),  # does not call torch's functions
            (torch.distributed, "destroy_process_group", _before(_left)),
        ]
        stages = sys.modules.get("torch.distributed.pipelining.stage")  # importing the module takes a second
        if stages is not None:
            patches += [
                (stages.PipelineStage, "_compute_outputs", _quiet),
                (stages.PipelineStage, "scale_grads", divided),
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


def _before(tell: Callable[..., None]) -> Telling:
    """Call ``tell`` for each listener before the torch function, with the function's arguments."""

    def telling(inner: Callable[..., object]) -> Callable[..., object]:
        @wraps(inner)
        def call(*args: object, **kwargs: object) -> object:
            for listener in tuple(_LISTENERS):
                tell(listener, *args, **kwargs)
            return inner(*args, **kwargs)

        return call

    return telling


def _after(tell: Callable[..., None]) -> Telling:
    """Call ``tell`` for each listener after the torch function, with the function's result and arguments."""

    def telling(inner: Callable[..., object]) -> Callable[..., object]:
        @wraps(inner)
        def call(*args: object, **kwargs: object) -> object:
            result = inner(*args, **kwargs)
            for listener in tuple(_LISTENERS):
                tell(listener, result, *args, **kwargs)
            return result

        return call

    return telling


def _differentiated(listener: Listener, tensors: object, *args: object, **kwargs: object) -> None:
    # Tensor.backward comes here, and a pipeline stage's loss is in a list
    loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        listener.differentiates(loss)


def _scaled(listener: Listener, scaled: object, scaler: object, outputs: object) -> None:
    if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
        listener.scales(outputs, scaled)


def _left(listener: Listener, group: ProcessGroup | None = None) -> None:
    # just before a loop destroys the process group, so that listeners can still use the group
    whole = group is None or group is torch.distributed.group.WORLD
    if whole:
        listener.leaves()


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


def _clipping(inner: Callable[..., object]) -> Callable[..., object]:
    signature = inspect.signature(inner)

    def clip(*args: object, **kwargs: object) -> object:
        named = signature.bind(*args, **kwargs).arguments
        parameters, limit = named["parameters"], named.get("max_norm")
        named["parameters"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for listener in tuple(_LISTENERS):
            listener.clips(named["parameters"], limit if isinstance(limit, float | int) else None)
        return inner(**named)

    return clip
