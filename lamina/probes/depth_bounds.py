"""FuseNorm's statements about depth, both sides measured on the blocks: its Eq 9, 13, 19, 20 and 21."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.probes.engine.layer_calls import LayerCall
from lamina.probes.residual_path import Wiring, largest_gain, norm_scale, wirings_of
from lamina.probes.spectral_norm import largest_singular_value, spectral_norm
from lamina.probes.structure.sites import FeedForward, NormSite, Point
from lamina.probes.weight_spectra import stacked_side


@dataclass(frozen=True)
class Sides:
    """A statement's two sides at one layer, [sequences] in float64."""

    layer: int
    sublayer: str
    role: str
    left: torch.Tensor
    right: torch.Tensor


def variance_sides(block: LayerCall, num_layers: int, constant: float) -> list[Sides]:
    """Eq 13 and 21, Var(F) against constant / L, for each branch; Eq 20, Var(Z) against Var(skip) + Var(F), at norms.

    L is the number of blocks. Variances are over a token's channels, their mean over the tokens of a sequence.
    """
    points: dict[Hashable, Point] = {}
    for index, sublayer in enumerate(block.site.sublayers):
        points["branch", index] = sublayer.contribution
        if (norm := post_norm(block, index)) is not None:
            points["sum", index] = norm.input
    with torch.no_grad():
        _, tensors = block.watch(points, block.stream)
    sides = []
    for index, sublayer in enumerate(block.site.sublayers):
        branch = tensors["branch", index].float() * _factor(sublayer.contribution)
        branch = branch.reshape(block.stream.shape)
        left = _variance(branch)
        right = torch.full_like(left, constant / num_layers)
        sides.append(Sides(block.site.index, sublayer.kind, "fusenorm_eq_21", left, right))
        if ("sum", index) in tensors:
            total = tensors["sum", index].float().reshape(block.stream.shape)
            uncorrelated = _variance(total - branch) + _variance(branch)
            sides.append(Sides(block.site.index, sublayer.kind, "fusenorm_eq_20", _variance(total), uncorrelated))
    return sides


def identity_distance(block: LayerCall, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """||J - I||_2 and the standard deviation of the block's input, [sequences]: Eq 9's sides but for a constant."""
    distance = spectral_norm(block, block.stream, batch_dims=1, identity=1.0, tolerance=tolerance).value
    return distance, _variance(block.stream).sqrt()


def jacobian_sides(block: LayerCall, tolerance: float) -> list[Sides]:
    """Eq 19: the block's Jacobian against the bound, as the paper approximates it and by the chain rule alone.

    For blocks wired as FuseNorm's: a norm on both sums, the feed-forward's skip carrying the block's input. The gains,
    which the paper takes for 1, are put in. role fusenorm_eq_19: sigma are means over tokens, and the feed-forward's
    Jacobian is ||W_2 W_1||, as if its activation were the identity (of a gated one W_1 is the up-projection and the
    gate is left out): no strict bound. role fusenorm_eq_19_chain: the smallest sigma over tokens and the feed-forward's
    measured Jacobian: a true bound. ||W_O J_A|| is in both the measured norm of the attention's Jacobian.
    """
    attention, feed_forward = block.site.sublayers
    norms = [norm for norm in (post_norm(block, 0), post_norm(block, 1)) if norm is not None]
    wirings = wirings_of(block.site)
    whole = spectral_norm(block, block.stream, batch_dims=1, tolerance=tolerance).value
    points = {"after": norms[0].output, 0: norms[0].input, 1: norms[1].input}
    with torch.no_grad():
        _, tensors = block.watch(points, block.stream)
    sigmas = [norm_scale(norms[i].module, tensors[i]).double().cpu().flatten(1) for i in (0, 1)]
    gains = [largest_gain(norm) for norm in norms]

    def branch(x: torch.Tensor) -> torch.Tensor:
        return block.watch({0: attention.contribution}, x)[1][0] * _factor(attention.contribution)

    def inner(y: torch.Tensor) -> torch.Tensor:
        end = feed_forward.contribution
        return block.between(norms[0].output, end, y) * _factor(end)

    mixing = spectral_norm(branch, block.stream, batch_dims=1, tolerance=tolerance).value
    measured = spectral_norm(inner, tensors["after"], batch_dims=1, tolerance=tolerance).value
    scales = [abs(wiring.skip_scale) for wiring in wirings]

    def bound(inverse: Sequence[torch.Tensor], jacobian: Any) -> torch.Tensor:
        first = gains[0] * inverse[0] * (scales[0] + mixing)
        return gains[1] * inverse[1] * (scales[1] + jacobian * first)

    sides = [
        Sides(
            *(block.site.index, "block", "fusenorm_eq_19_chain", whole),
            bound([1 / sigma.amin(1) for sigma in sigmas], measured),
        )
    ]
    if feed_forward.feed_forward is not None:
        product = product_norm(block, feed_forward.feed_forward)
        right = bound([1 / sigma.mean(1) for sigma in sigmas], product)
        sides.append(Sides(block.site.index, "block", "fusenorm_eq_19", whole, right))
    return sides


def fused(block: LayerCall) -> bool:
    """Whether a block is wired as FuseNorm's: both sums normed, the feed-forward's skip the block's input."""
    wirings: list[Wiring] = wirings_of(block.site)
    return len(wirings) == 2 and all(w.post_gain is not None for w in wirings) and wirings[1].skip == "block_input"


def unnormed(block: LayerCall) -> bool:
    """Whether no norm stands on a block's sums, so its residual path is the identity; the sums must be known."""
    return bool(block.site.sublayers) and all(
        post_norm(block, index) is None for index in range(len(block.site.sublayers))
    )


def post_norm(block: LayerCall, index: int) -> NormSite | None:
    """The norm on the sum behind a sub-layer."""
    return next((norm for norm in block.site.sublayers[index].norms if norm.role == "post_norm"), None)


def product_norm(block: LayerCall, feed_forward: FeedForward) -> float:
    """||W_2 W_1||_2 of a feed-forward's weights, without the product; W_1 is the up-projection, not the gate's."""
    down = _matrix(feed_forward.down[1])
    module = _up_projection(block, feed_forward)
    up = _matrix(module)
    if stacked_side(feed_forward, module) is not None:
        up = up.chunk(2)[1]  # the first half is what the nonlinearity reads, in every model that stacks them
    start = torch.randn(up.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(up.device)
    norm = largest_singular_value(lambda v: down @ (up @ v), lambda u: up.T @ (down.T @ u), start, tolerance=1e-4)
    return float(norm.value)


def _up_projection(block: LayerCall, feed_forward: FeedForward) -> nn.Module:
    """Of two projections the one whose output is not what goes into the nonlinearity."""
    modules = [module for _, module in feed_forward.up]
    if len(modules) == 1 or feed_forward.pre is None:
        return modules[-1]
    points: dict[int | str, Point] = {"pre": feed_forward.pre}
    for number, (path, module) in enumerate(feed_forward.up):
        points[number] = Point(module, path, "output", feed_forward.post.call)
    with torch.no_grad():
        _, tensors = block.watch(points, block.stream)
    others = [m for n, m in enumerate(modules) if not torch.equal(tensors[n], tensors["pre"])]
    return others[-1]


def _matrix(module: nn.Module) -> torch.Tensor:
    """A projection's weight as [out, in] in float64; GPT-2's Conv1D keeps the transpose."""
    stored: Any = module.weight
    weight = stored.detach().double()
    return weight if hasattr(module, "in_features") else weight.T


def _variance(x: torch.Tensor) -> torch.Tensor:
    """Over each token's channels, [sequences, tokens, channels], their mean over tokens: [sequences], float64."""
    return x.detach().float().var(-1, correction=0).double().mean(-1).cpu()


def _factor(point: Point) -> float | torch.Tensor:
    return 1.0 if point.factor is None else point.factor
