"""Blocks compiled in place: torch.compile one block at a time, so that depth costs no compile time.

All blocks share the code of one forward function, and what differs only by layer (weights, indices, scales) is an
input of its graph. So a model compiles one graph per *kind* of layer, that is per wiring and, in some backbones, per
kind of attention. A scale with many values (1/sqrt(l)) costs one more graph, compiled for any value.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from lamina.modeling.modeling_lamina import Block, Residual


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> int:
    """Compile every Block of ``model`` in place; returns the number of structural kinds.

    The parameters keep their names. The first step compiles the graphs for its batch's shape: a batch of another shape
    should run under `uncompiled`.
    """
    blocks = _blocks(model)
    kinds = len({structure(block) for block in blocks})
    # A plan may have more than 8 kinds; after 8 graphs, dynamo gives up and runs the rest uncompiled.
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * kinds + 2)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * dynamo.recompile_limit)
    # Recompute inputs of matrix products (a norm's output, the gated activations) in the backward pass from tensors
    # that are kept anyway: this saves a quarter of the activations' memory for a little elementwise work.
    functorch: Any = torch._functorch.config  # type: ignore[attr-defined]
    if hasattr(functorch, "ban_recompute_materialized_backward"):
        functorch.ban_recompute_materialized_backward = False
    for block in blocks:
        block.compile(backend=backend)
    return kinds


def discard(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for block in _blocks(model):
        block._compiled_call_impl = None


def structure(block: Block) -> tuple:
    """What a block's graph depends on: its modules, their shapes and settings, but not the values of weights or scales.

    Two blocks with equal structures share a graph.
    """
    parts: list[Any] = [getattr(block, "attention_type", None)]
    for name, module in block.named_modules():
        described = (name, type(module), tuple((n, p.shape) for n, p in module.named_parameters(recurse=False)))
        if isinstance(module, Residual):
            described += module.graph_key
        else:
            window = getattr(module, "sliding_window", None)
            described += (module.extra_repr(), window, getattr(module, "is_sliding", None))
        parts.append(described)
    return tuple(parts)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the blocks eagerly: a compiled block calls no hooks inside it, and recompiles for each shape."""
    calls = {block: block._compiled_call_impl for block in _blocks(model)}
    for block in calls:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in calls.items():
            block._compiled_call_impl = call


def compiled(model: nn.Module) -> bool:
    """Whether the blocks run compiled."""
    return any(block._compiled_call_impl is not None for block in _blocks(model))


def missing_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for ``device`` here; None if it can."""
    if device.type == "cuda":
        import importlib.util

        return None if importlib.util.find_spec("triton") else "triton is not installed"
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            compiler = get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler"
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler!r} is not found)"
    return f"not supported on {device.type!r}"


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]
