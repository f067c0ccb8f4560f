"""Running a model without some of its layers, whose neighbours stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.structure.discovery import LayerSite, Point
from lamina.probes.structure.tracing import first_tensor

REMOVE, BRANCH = "remove", "branch"
MEANINGS = (REMOVE, BRANCH)


def refill(output: Any) -> Callable[[torch.Tensor], Any]:
    """A function that makes a module's output again with another first tensor; it holds all of it but that tensor."""
    if isinstance(output, torch.Tensor):
        return lambda tensor: tensor
    named = isinstance(output, Mapping)
    keys = list(output) if named else []
    values: list[Any] = [output[key] for key in keys] if named else list(output)
    position = next(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
    values[position] = None
    kind = type(output)

    def make(tensor: torch.Tensor) -> Any:
        made = [*values[:position], tensor, *values[position + 1 :]]
        if named:
            return kind(**dict(zip(keys, made, strict=True)))
        return kind(*made) if hasattr(kind, "_fields") else kind(made)

    return make


@contextmanager
def removed(context: Context, layers: Sequence[int], meaning: str = REMOVE) -> Iterator[None]:
    """While open, every forward pass of the model goes without ``layers`` (indices); nothing else about it changes.

    ``remove``: a layer hands on what it was given. ``branch``: what its sub-layers add is zero, its skips, their scales
    and its post-norms stay (for Pre-LN the same). The layer is still computed, so a cache of keys and values stays
    whole; of a module that several layers share only the calls that are meant are changed.
    """
    roots = roots_of(context)
    with as_written(context.model), ExitStack() as stack:
        for index in layers:
            site = context.structure.layers[index]
            if meaning == REMOVE:
                stack.enter_context(replaced(roots, site.output, _skip, keep=site.input))
            else:
                for point in contributions(site):
                    stack.enter_context(replaced(roots, point, zeros))
        yield


def roots_of(context: Context) -> list[nn.Module]:
    """Whose forward pass begins a new count of calls: a head need not call the base model (OPT's doesn't)."""
    return [context.model] if context.base is context.model else [context.model, context.base]


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Modules compiled in place run as they are written: a compiled one calls no hook inside it."""
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def contributions(site: LayerSite) -> list[Point]:
    """Where what a layer's sub-layers add can be watched. Raises UserError where they were not found."""
    if not site.sublayers:
        raise UserError(
            f"meaning: 'branch' needs the sub-layers of layer {site.index}, which were not found (allowed: remove)"
        )
    return [sublayer.contribution for sublayer in site.sublayers]


def zeros(output: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """Nothing is added, be it finite or not."""
    return torch.zeros_like(output)


def _skip(output: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    assert given is not None
    return given


@contextmanager
def replaced(
    roots: Sequence[nn.Module],
    point: Point,
    change: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    keep: Point | None = None,
) -> Iterator[None]:
    """Replace a point's tensor by ``change(tensor, the input at keep)`` in each forward pass of ``roots``."""
    state: dict[str, Any] = {"calls": -1, "given": None}

    def start(module: nn.Module, args: tuple) -> None:
        state["calls"] = -1

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        state["calls"] += 1
        if state["calls"] != point.call:
            return None
        if keep is not None:
            found = argument_of(args, kwargs, keep.argument)
            state["given"] = found.clone()  # a layer may add to it in place
        if point.side == "input":
            return with_argument(args, kwargs, point.argument, change(argument_of(args, kwargs, point.argument), None))
        return None

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        if state["calls"] != point.call or point.side != "output":
            return None
        tensor = first_tensor(output)
        assert tensor is not None
        given, state["given"] = state["given"], None
        return refill(output)(change(tensor, given))

    handles = [
        *(root.register_forward_pre_hook(start) for root in roots),
        point.module.register_forward_pre_hook(before, with_kwargs=True),
        point.module.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def argument_of(args: tuple, kwargs: Mapping[str, Any], which: int | str) -> torch.Tensor:
    return args[which] if isinstance(which, int) else kwargs[which]


def with_argument(args: tuple, kwargs: Mapping[str, Any], which: int | str, value: torch.Tensor) -> tuple[tuple, dict]:
    if isinstance(which, int):
        return (*args[:which], value, *args[which + 1 :]), dict(kwargs)
    return args, {**kwargs, which: value}
