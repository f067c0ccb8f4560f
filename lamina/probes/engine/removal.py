"""Running a model without some of its layers, whose neighbors stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.structure.hooks import intercept
from lamina.probes.structure.sites import LayerSite, Point

REMOVE, BRANCH = "remove", "branch"
MEANINGS = (REMOVE, BRANCH)


@contextmanager
def removed(context: Context, layers: Sequence[int], meaning: str = REMOVE) -> Iterator[None]:
    """In this context, every forward pass of the model omits ``layers`` (indices); nothing else changes.

    ``remove``: a layer returns its input. ``branch``: its sub-layers add zero, but its skips, their scales and its
    post-norms stay (the same for Pre-LN). The layer is still computed, so a cache of keys and values stays whole. If
    several layers share a module, only the calls of the removed layers change.
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
    """The modules whose forward pass restarts the count of calls: a head may bypass the base model (OPT's)."""
    return [context.model] if context.base is context.model else [context.model, context.base]


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """In this context modules compiled in place run uncompiled: a compiled module calls no hooks inside it."""
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def contributions(site: LayerSite) -> list[Point]:
    """The points of what a layer's sub-layers add. Raises UserError if the sub-layers were not found."""
    if not site.sublayers:
        raise UserError(
            f"meaning: 'branch' needs the sub-layers of layer {site.index}, which were not found (allowed: remove)"
        )
    return [sublayer.contribution for sublayer in site.sublayers]


def zeros(output: torch.Tensor, layer_input: torch.Tensor | None) -> torch.Tensor:
    """Zeros in the shape of ``output``, which may hold NaN."""
    return torch.zeros_like(output)


def _skip(output: torch.Tensor, layer_input: torch.Tensor | None) -> torch.Tensor:
    assert layer_input is not None
    return layer_input


@contextmanager
def replaced(
    roots: Sequence[nn.Module],
    point: Point,
    change: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    keep: Point | None = None,
) -> Iterator[None]:
    """Replace a point's tensor by ``change(tensor, the input at keep)`` in each forward pass of ``roots``."""
    layer_input: torch.Tensor | None = None

    def intercepted(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        nonlocal layer_input
        if key == "keep":
            layer_input = tensor.clone()  # a layer may add to it in place
            return None
        before, layer_input = layer_input, None
        return change(tensor, before)

    points = {"point": point} if keep is None else {"keep": keep, "point": point}
    with intercept(points, intercepted, roots=roots):
        yield
