"""Norms of the blocks' Jacobians, one by one and of their product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.probes.engine.context import Context
from lamina.probes.engine.layer_calls import LayerCall, frozen, record_layer_calls, short_inputs
from lamina.probes.spectral_norm import Jacobian, SpectralNorm, largest_singular_value, spectral_norm, start_vector


def block_norms(
    context: Context,
    *,
    sequences: int = 1,
    tokens: int = 32,
    identity: float = 0.0,
    tolerance: float = 1e-2,
    iterations: int = 100,
) -> torch.Tensor:
    """||dx^(l+1)/dx^l - identity * I||_2 of every block, [layers, sequences], float64; over all tokens of a sequence.

    ``tokens``: how many of each sequence; the other arguments are those of ``spectral_norm``.
    """
    inputs = short_inputs(context, sequences, tokens)
    norms = []
    with context.eager_attention(), frozen(context.model):
        for block in record_layer_calls(context, inputs):
            options = {"batch_dims": 1, "identity": identity, "tolerance": tolerance, "iterations": iterations}
            norms.append(spectral_norm(block, block.stream, **options).value)
    return torch.stack(norms)


def log10_total_norm(
    blocks: Sequence[LayerCall], *, tolerance: float, iterations: int
) -> tuple[torch.Tensor, SpectralNorm]:
    """log10 ||dx^N/dx^0||_2, [sequences], of the product of all blocks' Jacobians, and how the search for it ended.

    Keeps every block's graph of one short input, as a training step would. A thousand blocks can shrink a vector below
    the smallest float, so each is divided by what it did to a random one, and the logarithms are added.
    """
    jacobians = [Jacobian(block, block.stream) for block in blocks]
    start = start_vector(blocks[0].stream)
    scales, v = [], start
    for jacobian in jacobians:
        u = jacobian.forward(v)
        scale = _length(u) / _length(v)
        scales.append(torch.where(scale > 0, scale, torch.ones_like(scale)))
        v = u / scales[-1]

    def forward(v: torch.Tensor) -> torch.Tensor:
        for jacobian, scale in zip(jacobians, scales, strict=True):
            v = jacobian.forward(v) / scale
        return v

    def transpose(u: torch.Tensor) -> torch.Tensor:
        for jacobian, scale in zip(reversed(jacobians), reversed(scales), strict=True):
            u = jacobian.transpose(u) / scale
        return u

    norm = largest_singular_value(forward, transpose, start, batch_dims=1, tolerance=tolerance, iterations=iterations)
    shift = torch.stack([scale.flatten().double().cpu().log10() for scale in scales]).sum(0)
    return shift + norm.value.log10(), norm


def _length(x: torch.Tensor) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True, dtype=torch.float64)
    return length.to(x.dtype)
