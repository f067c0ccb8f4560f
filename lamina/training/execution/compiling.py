"""Compile a model's blocks with torch.compile, so that deeper models take no longer to compile.

Torch compiles one graph for each kind of layer. Weights and scales, which differ between layers, are inputs of the
graph.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from lamina.modeling.linear_cross_entropy import LinearLoss
from lamina.modeling.wiring_lamina import Block, Residual
from lamina.training.execution.graphs import Replay

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h


def prepare(model: nn.Module, *, compiled: bool, replayed: bool = False, device: str = "cpu") -> None:
    """Compile a model's blocks for training, replay the blocks as CUDA graphs, or leave the model unchanged."""
    keep_freed_memory()
    if hasattr(model, "linear_loss"):
        model.linear_loss = LinearLoss(compiled=compiled)  # type: ignore[assignment]
    discard(model)
    if compiled:
        compile_blocks(model, recomputed=device != "cuda")
    elif replayed:
        Replay(_blocks(model))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, in allocations of up to 32 MiB (glibc's maximum).

    Without this setting, the system zeroes the memory at each step, which takes 3 to 8 % of a step on a CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def compile_blocks(model: nn.Module, *, backend: str = "inductor", recomputed: bool = True) -> int:
    """Compile each block of a model in place. Returns the number of different block structures.

    The first step compiles graphs for the shape of the first batch. Run a batch of another shape inside
    `parts.uncompiled`.

    Args:
        recomputed: whether the backward pass recomputes the outputs of norms and gates. Recomputing saves a quarter of
            the activations' memory, and slows a GPU down more than a CPU.
    """
    blocks = _blocks(model)
    kinds = len({structure(block) for block in blocks})
    # A model may have more than 8 kinds of layers. By default, dynamo compiles only 8 graphs.
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * kinds + 2)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * dynamo.recompile_limit)
    functorch: Any = torch._functorch.config  # type: ignore[attr-defined]
    if hasattr(functorch, "ban_recompute_materialized_backward"):
        functorch.ban_recompute_materialized_backward = not recomputed
    for block in blocks:
        block.compile(backend=backend)
    return kinds


def discard(model: nn.Module) -> None:
    """Undo `compile_blocks` and `Replay`."""
    for block in _blocks(model):
        block._compiled_call_impl = None


def structure(block: Block) -> tuple:
    """Return a key of a block's modules, shapes and settings. Blocks with equal keys can share a compiled graph."""
    parts: list[Any] = [getattr(block, "attention_type", None)]
    for name, module in block.named_modules():
        described = (name, type(module), tuple((n, p.shape) for n, p in module.named_parameters(recurse=False)))
        if isinstance(module, Residual | Block):
            described += module.graph_key
        else:
            window = getattr(module, "sliding_window", None)
            described += (module.extra_repr(), window, getattr(module, "is_sliding", None))
        parts.append(described)
    return tuple(parts)


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]
