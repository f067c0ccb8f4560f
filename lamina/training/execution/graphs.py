"""Replay a model's blocks as CUDA graphs, which saves the time to launch kernels one by one.

The first training pass runs normally. The second pass captures each block's forward and backward pass. Later passes
replay the same kernels in the same order, so the results stay equal. Evaluations and the layer monitor run without
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lamina.errors import UserError
from lamina.modeling.wiring_lamina import Block

Replayed: TypeAlias = Sequence[Callable[..., object]]
Capture: TypeAlias = Callable[[tuple[nn.Module, ...], tuple[tuple[torch.Tensor, ...], ...]], Replayed]
"""A function that records modules' calls on sample tensors, and returns functions that replay the recordings."""


class BlockCall(NamedTuple):
    """The arguments of a block's call, with shapes in place of tensors. Equal calls can share a graph."""

    tree: pytree.TreeSpec
    constants: tuple[object, ...]
    tensors: tuple[tuple[torch.Size, torch.dtype, torch.device, bool], ...]

    @classmethod
    def of(cls, arguments: object) -> tuple[BlockCall, list[torch.Tensor]]:
        """Describe a block's arguments. Return the description, and the tensors in the arguments."""
        leaves, tree = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(tree, constants, tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)), tensors

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        left = iter(tensors)
        leaves = [next(left) if leaf is _TENSOR else leaf for leaf in self.constants]
        return cast(tuple[tuple[object, ...], dict[str, object]], pytree.tree_unflatten(leaves, self.tree))

    def samples(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device, requires_grad=gradient)
            for shape, dtype, device, gradient in self.tensors
        )


_TENSOR = object()


class _OfTensors(nn.Module):
    """A block whose forward method takes only tensors, as CUDA graphs require."""

    def __init__(self, block: Block, call: BlockCall):
        super().__init__()
        self.block, self.call = block, call

    def forward(self, *tensors: torch.Tensor) -> object:
        args, kwargs = self.call.arguments(tensors)
        return self.block._call_impl(*args, **kwargs)  # runs the block's hooks, but does not replay the block


class Replay:
    """The CUDA graphs of a model's blocks, in order. Do not move the weights while the graphs are in use."""

    def __init__(self, blocks: Sequence[Block], capture: Capture | None = None):
        self.blocks = blocks
        self.capture = cast(Capture, torch.cuda.make_graphed_callables) if capture is None else capture
        self.calls: dict[int, BlockCall] = {}
        self.graphs: Replayed | None = None
        for index, block in enumerate(blocks):
            block._compiled_call_impl = partial(self._call, index)  # the attribute that `block.compile` also sets

    def _call(self, index: int, *args: object, **kwargs: object) -> object:
        block = self.blocks[index]
        if not (block.training and torch.is_grad_enabled()):
            return block._call_impl(*args, **kwargs)
        call, tensors = BlockCall.of((args, kwargs))
        if self.graphs is None and index == 0 and len(self.calls) == len(self.blocks):
            self.graphs = self._captured()
        if self.graphs is None:
            self.calls[index] = call
        elif call == self.calls[index]:
            return self.graphs[index](*tensors)
        return block._call_impl(*args, **kwargs)

    def _captured(self) -> Replayed:
        functions = tuple(_OfTensors(block, self.calls[i]) for i, block in enumerate(self.blocks))
        samples = tuple(self.calls[i].samples() for i in range(len(self.blocks)))
        enabled = torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled, cache_enabled=False):
            try:
                return self.capture(functions, samples)
            except RuntimeError as error:
                raise UserError(
                    f"cuda_graphs: the blocks can't be captured: {str(error).splitlines()[0]}. Leave out --cuda-graphs."
                ) from error
