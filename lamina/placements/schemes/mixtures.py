"""Placements whose norms differ from layer to layer, or stand inside the attention: Mix-LN, HybridNorm."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction

from lamina.errors import UserError
from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement

logger = logging.getLogger(__name__)


@placement(
    "mix_ln",
    title="Mix-LN",
    equation=(
        "blocks 1 .. floor(alpha N):  y = LN(x + A(x)),  x' = LN(y + F(y))",
        "the other blocks:            y = x + A(LN x),   x' = y + F(LN y)",
        "logits = W LN(x_N)",
    ),
    source="Mix-LN (arXiv 2412.13795) Sec 3",
    advice="learning rate 1e-3 up to 350M and 5e-4 from 1B in the paper, warm-up 10 %; alpha 0.0625 at 7B",
)
def mix_ln(num_layers: int, *, alpha: float | str | None = None, num_post_layers: int | None = None) -> Plan:
    """Post-LN's large gradients in the deep layers of its part meet Pre-LN's large ones in the early layers of its own.

    Args:
        alpha: the share of Post-LN layers, the border being floor(alpha N) in exact arithmetic (default 0.25;
            a fraction such as "1/3" is taken exactly).
        num_post_layers: the number of Post-LN layers itself, in place of alpha.
    """
    if alpha is not None and num_post_layers is not None:
        raise UserError("placement 'mix_ln': give 'alpha' or 'num_post_layers', not both")
    if num_post_layers is None:
        try:
            share = Fraction(str(0.25 if alpha is None else alpha))  # 0.29 is 29/100: floor(.29 * 100) is 29
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not 0 <= share <= 1:
            raise UserError(f"placement 'mix_ln': option 'alpha' is {alpha!r} (allowed: 0 to 1)")
        num_post_layers = share.numerator * num_layers // share.denominator
        if num_post_layers == 0 and share > 0:
            logger.warning(
                "mix_ln: floor(%s * %d) is 0 Post-LN layers, so this is Pre-LN; raise alpha or give num_post_layers",
                *(alpha or 0.25, num_layers),
            )
    if not 0 <= num_post_layers <= num_layers:
        raise UserError(
            f"placement 'mix_ln': option 'num_post_layers' is {num_post_layers} (allowed: 0 to {num_layers})"
        )
    post, pre = Layer.of(Sublayer(post_norm=Norm())), Layer.of(Sublayer(pre_norm=Norm()))
    return Plan(layers=(post,) * num_post_layers + (pre,) * (num_layers - num_post_layers), final_norm=Norm())


# The norm before the feed-forward is applied once and is both its input and its skip: that of the attention's sum.
_HYBRID = Layer(attention=Sublayer(post_norm=Norm()), feed_forward=Sublayer())


@placement(
    "hybridnorm",
    title="HybridNorm",
    equation=(
        "y = x + A_qkv(x)",
        "z = LN(y)",
        "x' = z + F(z)",
        "A_qkv: per-head norms on q, k and v",
        "logits = W LN(x_N)",
    ),
    source="HybridNorm (arXiv 2503.04598) Sec 3.2",
    initialization="small_scaled",
    advice="learning rate 3e-4 at 550M to 1.2B in the paper, falling to a tenth; SmallInit scaled by depth",
)
def hybridnorm(num_layers: int) -> Plan:
    """Normalizes inside the attention and around the feed-forward; the feed-forward's skip carries the normed state."""
    return Plan(layers=(_HYBRID,) * num_layers, final_norm=Norm(), qk_norm="head", v_norm="head")


@placement(
    "hybridnorm_star",
    title="HybridNorm*",
    equation=(
        "y = x + A_qkv(x)",
        "z = LN(y)",
        "x' = z + F(z)",
        "block 1:  y = x + A_qkv(LN x),  x' = y + F(LN y)",
        "logits = W LN(x_N)",
    ),
    source="HybridNorm (arXiv 2503.04598) Sec 3.2, Eq 10",
    initialization="small_scaled",
    advice="learning rate 3e-4 at 550M to 1.2B in the paper, falling to a tenth; SmallInit scaled by depth",
)
def hybridnorm_star(num_layers: int) -> Plan:
    """HybridNorm with a Pre-LN first block, which keeps its norms on q, k and v."""
    plan = hybridnorm(num_layers)
    return replace(plan, layers=(Layer.of(Sublayer(pre_norm=Norm())), *plan.layers[1:]))
