"""The papers' formulas for the residual path: through the skips and the norms on them, without branches.

Plain data and arithmetic: only the norms and scales on a skip count, not the placement's name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lamina.modeling.modeling_lamina import skip_source
from lamina.probes.structure.sites import LayerSite, NormSite, SublayerSite


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """One sub-layer y = C(skip_scale * s + B(F(pre_scale * A(x)))), as far as the residual path goes.

    Gains of A, B and C are root mean squares over the channels, None where there is no such norm; ``path_scale`` is
    gain of C * skip_scale, [channels] or one number: the numerator of the path's Jacobian.
    """

    skip: str = "stream"  # stream | block_input | both
    skip_scale: float = 1.0
    pre_scale: float = 1.0
    pre_gain: float | None = None
    out_gain: float | None = None
    post_gain: float | None = None
    path_scale: torch.Tensor | float = 1.0


def block_factor(wirings: Sequence[Wiring], sigmas: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """The residual path's Jacobian norm through one block, from the standard deviations at its post-norms' inputs.

    A norm on the path multiplies by gain / sigma (FuseNorm Eq 16: 1 / sigma), the skip by its scale; two norms on a
    Post-LN block's path give sigma^-2, one on FuseNorm's sigma^-1 (FuseNorm Eq 10 and 11). Each channel is followed
    by itself, and the largest is the block's; the direction that a norm takes away is left out, as in the papers.

    ``sigmas``: one per sub-layer, numbers or tensors [...], not read if the sub-layer has no norm on its sum.
    Returns a float64 tensor of their shape.
    """
    through = torch.ones(1, dtype=torch.float64)
    for wiring, sigma in zip(wirings, sigmas, strict=True):
        carried = skip_source(wiring.skip, through, torch.ones_like(through))
        through = carried * torch.as_tensor(wiring.path_scale, dtype=torch.float64)
        if wiring.post_gain is not None:
            through = through / torch.as_tensor(sigma, dtype=torch.float64)[..., None]
    return through.abs().amax(-1)


def expected_sigmas(layers: Sequence[Sequence[Wiring]], start: float) -> list[list[float]]:
    """The standard deviation of every sub-layer's sum, from gains and scales alone (Keel Eq 14-19).

    As in the paper, attention and feed-forward keep the scale of what they read, and skip and branch are uncorrelated:
    sigma^2 = (alpha * scale of the skip)^2 + (scale of the branch)^2. With the gains g at the outer norms and at
    the inner one that is g_{l-1,1}^2 alpha^2 + g_{l,2}^2. ``start``: the root mean square of x^0.
    """
    sigmas, stream = [], start
    for layer in layers:
        block_input, layer_sigmas = stream, []
        for wiring in layer:
            read = (stream if wiring.pre_gain is None else wiring.pre_gain) * wiring.pre_scale
            branch = read if wiring.out_gain is None else wiring.out_gain
            skip = math.sqrt(skip_source(wiring.skip, stream**2, block_input**2))  # uncorrelated: variances add
            sigma = ((wiring.skip_scale * skip) ** 2 + branch**2) ** 0.5
            layer_sigmas.append(sigma)
            stream = sigma if wiring.post_gain is None else wiring.post_gain
        sigmas.append(layer_sigmas)
    return sigmas


def wirings_of(site: LayerSite) -> list[Wiring]:
    """How a layer's sub-layers are wired: a Lamina model's skips and scales are its plan's, others' are plain."""
    return [_wiring(site, sublayer) for sublayer in site.sublayers]


def _wiring(site: LayerSite, sublayer: SublayerSite) -> Wiring:
    gains = {norm.role: _gain(norm) for norm in sublayer.norms}
    sizes = {role: float(gain.square().mean().sqrt()) for role, gain in gains.items()}
    residual = next((m for m in site.module.modules() if _is_residual(m, sublayer)), None)
    scale = torch.as_tensor(getattr(residual, "skip_scale", 1.0)).detach().double().cpu()
    pre_scale = torch.as_tensor(getattr(residual, "pre_scale", 1.0)).detach().double().cpu()
    return Wiring(
        skip=str(getattr(residual, "skip", "stream")),
        skip_scale=float(scale.square().mean().sqrt()),
        pre_scale=float(pre_scale.square().mean().sqrt()),
        pre_gain=sizes.get("pre_norm"),
        out_gain=sizes.get("out_norm"),
        post_gain=sizes.get("post_norm"),
        path_scale=gains.get("post_norm", torch.ones((), dtype=torch.float64)) * scale,
    )


def _is_residual(module: nn.Module, sublayer: SublayerSite) -> bool:
    """Whether a module adds this sub-layer by a plan's record: Lamina's Residual, whichever copy of its code."""
    added = sublayer.contribution.module
    return hasattr(module, "skip") and hasattr(module, "skip_scale") and any(m is added for m in module.modules())


def _gain(norm: NormSite) -> torch.Tensor:
    """The gain, [channels] in float64 on the CPU; a constant one where the norm has none to learn."""
    gain = norm.gain
    if gain is None:
        return torch.as_tensor(float(getattr(norm.module, "initial_gain", 1.0)), dtype=torch.float64)
    return gain.detach().double().cpu()


def largest_gain(norm: NormSite) -> float:
    """The largest |gain| over the channels."""
    return float(_gain(norm).abs().max())


def norm_scale(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm's divisor for each token, [...], from its input [..., channels], without epsilon; float32 at least.

    The root mean square, or the standard deviation if the norm subtracts the mean; of a norm over groups of channels
    the smallest group's, which has the largest Jacobian.
    """
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    groups = int(getattr(module, "groups", 1))
    x = x.unflatten(-1, (groups, -1))
    if subtracts_mean(module, x.shape[-1] * groups):
        x = x - x.mean(-1, keepdim=True)
    return x.square().mean(-1).sqrt().amin(-1)


def subtracts_mean(module: nn.Module, channels: int) -> bool:
    """Whether a norm subtracts the mean over the channels, as LayerNorm does and RMSNorm does not; found by trying."""
    parameter = next(module.parameters(), None)
    like = {} if parameter is None else {"device": parameter.device, "dtype": parameter.dtype}
    x = torch.linspace(-1, 1, channels, **like)[None, None]
    with torch.no_grad():
        shifted, plain = module(x + 3), module(x)
    return bool((shifted - plain).abs().max() < 0.1 * (plain.abs().max() + 1e-12))
