"""Compile blocks in place with torch.compile, one block at a time, so that more depth costs no compile time.

All blocks share the code of one forward function. Weights, indices and scales, which differ between layers, are inputs
of the function's graph. So torch compiles one graph for each kind of layer. Layers of one kind have the same structure
and, in some backbones, the same kind of attention. If the layers have different scales, such as 1/sqrt(l), torch
compiles one more graph that accepts any scale.
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

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def prepare(model: nn.Module, *, compiled: bool, replayed: bool = False, device: str = "cpu") -> None:
    """Prepare ``model`` for training on ``device``: compile its blocks, replay them as CUDA graphs, or do neither.

    Trainer sets the precision.
    """
    keep_freed_memory()
    if hasattr(model, "linear_loss"):
        model.linear_loss = LinearLoss(compiled=compiled)  # type: ignore[assignment]
    discard(model)
    if compiled:
        compile_blocks(model, recomputed=device != "cuda")
    elif replayed:
        Replay(_blocks(model))


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, in allocations of up to 32 MiB (glibc's maximum).

    By default, glibc returns the memory of freed activations to the system. The next step allocates the memory again,
    and the system must zero each page. Zeroing takes 3 to 8 % of a step on a CPU. Does nothing without glibc.
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
    """Compile each Block of ``model`` in place. Return the number of different block structures.

    With ``recomputed``, the backward pass recomputes the inputs of matrix products from tensors that stay in memory.
    The recomputed inputs are norms' outputs and gated activations. Recomputing saves a quarter of the activations'
    memory, and costs a little elementwise work. This work takes relatively more time on a GPU.

    The parameters keep their names. The first step compiles graphs for the shape of its batch. Run a batch of another
    shape under `parts.uncompiled`.
    """
    blocks = _blocks(model)
    kinds = len({structure(block) for block in blocks})
    # A plan may have more than 8 kinds; after 8 graphs, dynamo gives up and runs the rest uncompiled.
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
    """Return a key for a block's graph. The key contains the block's modules, shapes and settings, but no values of
    weights or scales.

    Two blocks with equal keys share a graph.
    """
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
