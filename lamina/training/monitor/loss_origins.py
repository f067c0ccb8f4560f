"""Find out how a tensor that a loss receives was computed: by a bounded activation, or from which vectors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch

from lamina.probes.structure.hooks import Output

RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
}
"""The lowest and highest output of each activation."""
_MOVES = {
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Squeeze", "Unsqueeze", "Transpose", "T"),
    *("Permute", "Slice", "Select", "Expand"),
}
_SCALES = {*_MOVES, "Mul", "Div", "MaskedFill", "Where", "Sub", "Cat", "Stack"}
_UNIT = 1e-2  # the largest difference of a normalized vector's length from 1


def _name_of(node: Output) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _nodes(tensor: torch.Tensor, through: Collection[str]) -> Iterator[Output]:
    """Yield the operations that made a tensor, back to the first operations that are not in ``through``."""
    nodes, seen = [tensor.grad_fn], set[Output]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [next_node for next_node, _ in node.next_functions] if _name_of(node) in through else []


def range_of(tensor: torch.Tensor) -> tuple[float, float] | None:
    """Return the range of the activation that made a tensor, or None if no bounded activation made it."""
    *_, last = (None, *_nodes(tensor, _MOVES))
    return RANGES.get(_name_of(last)) if last is not None else None


def lengths_of(scores: torch.Tensor, cosines: Collection[Output]) -> float | None:
    """Return the median length of the trainable vectors whose products are the scores, or None for other scores.

    Args:
        cosines: the operations of torch's cosine similarity, whose vectors have the length 1.
    """
    for node in _nodes(scores, _SCALES):
        if node in cosines:
            return 1.0
        if _name_of(node) in ("Mm", "Bmm"):
            one, other = (getattr(node, f"_saved_{name}", None) for name in ("self", "mat2"))
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                sizes = torch.cat([one.norm(dim=-1).flatten(), other.norm(dim=-2).flatten()])
                middle = float(sizes.detach().float().median())
                return 1.0 if bool(((sizes - 1).abs() < _UNIT).all()) else middle
    return None
