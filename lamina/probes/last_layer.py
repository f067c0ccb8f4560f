"""Peri-LN's Proposition 3.1: how large the gradient of the last feed-forward's down-projection can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.layer_calls import frozen
from lamina.probes.residual_path import largest_gain, norm_scale
from lamina.probes.structure.hooks import intercept
from lamina.probes.structure.sites import FeedForward, LayerSite, NormSite, Point, SublayerSite


@dataclass(frozen=True)
class LastLayer:
    """The last layer's feed-forward and the norms between its down-projection and the layer's output.

    ``statement``: c1 without such a norm (Pre-LN), c2 with one on the output before the sum (Peri-LN), c3 with one on
    the sum (Post-LN), c2_c3 with both.
    """

    site: LayerSite
    sublayer: SublayerSite
    feed_forward: FeedForward
    norms: tuple[NormSite, ...]
    statement: str

    @classmethod
    def of(cls, context: Context) -> LastLayer:
        """Raises UserError where the last layer has no dense feed-forward."""
        site = context.structure.layers[-1]
        for sublayer in reversed(site.sublayers):
            if sublayer.feed_forward is not None:
                norms = tuple(norm for norm in sublayer.norms if norm.role in ("out_norm", "post_norm"))
                roles = [norm.role for norm in norms]
                names = [name for name, role in (("c2", "out_norm"), ("c3", "post_norm")) if role in roles]
                return cls(site, sublayer, sublayer.feed_forward, norms, "_".join(names) or "c1")
        raise UserError(
            "bounds: the last layer has no dense feed-forward (experts, or none), so Proposition 3.1 has none"
        )


@dataclass(frozen=True)
class LastLayerSides:
    """Both sides for one batch, float64: of the gradient of the loss, and of each token's share of it, [tokens]."""

    left: float
    right: float
    left_by_token: torch.Tensor
    right_by_token: torch.Tensor


def last_layer_sides(context: Context, last: LastLayer, inputs: Mapping[str, torch.Tensor]) -> LastLayerSides:
    """Measure both sides on one batch: one forward pass, and a backward pass down to the last feed-forward.

    With h_t what goes into the down-projection W, a_t what comes out, and o the layer's output, for the tokens t:

        left    ||dL/dW||_F = ||sum_t h_t (x) dL/da_t||_F
        right   sum_t ||h_t|| ||dL/do_t|| * product over the norms behind W of 2 max|gamma| sqrt(D) / ||their input_t||

    Peri-LN (21) and (37) have 2 in the place of ||dL/do_t||, the bound of ||softmax(o) - y|| where the logits are o; a
    model has a final norm and a head behind o. (11) is an equality: without a norm each token's sides are the same.
    """
    down_path, down = last.feed_forward.down
    points: dict[str, Point] = {
        "h": last.feed_forward.post,
        "a": Point(down, down_path, "output", last.feed_forward.post.call),
        "o": last.site.output,
    }
    points |= {f"norm{number}": norm.input for number, norm in enumerate(last.norms)}
    tensors: dict[str, torch.Tensor] = {}

    def change(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if key == "a":  # the graph starts here: nothing before it is kept
            tensors[key] = tensor.detach().requires_grad_()
            return tensors[key].clone()  # Falcon adds to it in place
        tensors[key] = tensor
        return None

    with frozen(context.model), torch.enable_grad(), intercept(points, change, roots=[context.model]):
        loss = context.loss(inputs)
        by_a, by_o = torch.autograd.grad(loss, [tensors["a"], tensors["o"]])
    tokens = [_by_token(tensor) for tensor in (tensors["h"], by_a, by_o)]
    h, by_a, by_o = tokens
    right = h.norm(dim=-1) * by_o.norm(dim=-1) * _largest(last.sublayer.contribution.factor)
    for number, norm in enumerate(last.norms):
        scale = norm_scale(norm.module, tensors[f"norm{number}"]).double().cpu().flatten()
        right = right * 2 * largest_gain(norm) / scale
    left = h.norm(dim=-1) * by_a.norm(dim=-1)
    return LastLayerSides(float((h.T @ by_a).norm()), float(right.sum()), left, right)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten(0, -2).double().cpu()


def _largest(factor: float | torch.Tensor | None) -> float:
    """The largest factor by which a scale on the branch can stretch it."""
    return 1.0 if factor is None else float(torch.as_tensor(factor).detach().abs().max())
