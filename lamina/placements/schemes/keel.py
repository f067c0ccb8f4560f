"""Keel: Post-LN with a strong skip and a norm inside the branch."""

from __future__ import annotations

from typing import Literal

from lamina.errors import UserError
from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "keel",
    title="Keel",
    equation=(
        "y = LN(alpha x + A(LN x))",
        "x' = LN(alpha y + F(LN y))",
        "block 0:  y = x + A(LN x),  x' = LN(y + F(LN y))",
        "alpha = 2 N, the number of sub-layers",
    ),
    source="Keel (arXiv 2601.19895) Sec 4; first layer: Sec 4.3",
    initialization="normal",
    advice=(
        "The paper's learning rate is 9e-3 at 64 and 128 sub-layers, 6e-3 at 512 and 4.5e-3 at 1,024. The paper uses "
        "2,500 steps of warm-up."
    ),
)
def keel(
    num_layers: int,
    *,
    alpha: float | None = None,
    learnable_alpha: bool = False,
    variant: Literal["keel", "scale", "scale_gain", "scale_gain_norm"] = "keel",
    first_layer: Literal["paper", "post_ln", "pre_ln", "scaled", "keel"] = "paper",
) -> Plan:
    """The outer norm fixes the residual stream's scale. With alpha, the product of the blocks' Jacobians tends to 1, so
    the gradient does not vanish.

    Args:
        alpha: the constant on the skip (default: 2 N, the number of sub-layers). The paper does not learn alpha.
        learnable_alpha: whether each sub-layer learns a scalar alpha, which starts at the constant.
        variant: "keel", or an ablation of Sec 4.2. "scale" is LN(alpha x + F(x)). "scale_gain" is LN(alpha x + F(b *
            x)) with a learned vector b. "scale_gain_norm" is LN(alpha x + F(b * LN(x))), where LN(x) has no gain. This
            variant computes the same function as Keel, because b acts as the inner norm's gain.
        first_layer: the norms and alpha of the first block. "paper": both sub-layers have alpha = 1, and the attention
            has no outer norm. "post_ln": like "paper", but the feed-forward has no inner norm. (The paper's text allows
            both readings.) "pre_ln": the whole block is Pre-LN. "scaled": like "paper", but the feed-forward keeps
            alpha. "keel": the first block is like every other block.
    """
    if alpha is not None and alpha <= 0:
        raise UserError(f"placement 'keel': option 'alpha' is {alpha!r}. Give a number above 0.")
    skip_scale = float(2 * num_layers if alpha is None else alpha)
    inner = {"keel": Norm(), "scale": None, "scale_gain": None, "scale_gain_norm": Norm(learnable_gain=False)}[variant]
    gain: Literal["no", "vector"] = "vector" if variant in ("scale_gain", "scale_gain_norm") else "no"
    sublayer = Sublayer(
        pre_norm=inner,
        post_norm=Norm(),
        skip_scale=skip_scale,
        skip_scale_learned="scalar" if learnable_alpha else "no",
        pre_scale_learned=gain,
    )
    rest = Layer.of(sublayer)
    first = rest
    if first_layer != "keel":
        pre = Sublayer(pre_norm=Norm())
        feed_forward = {
            "paper": Sublayer(pre_norm=Norm(), post_norm=Norm()),
            "post_ln": Sublayer(post_norm=Norm()),
            "pre_ln": pre,
            "scaled": sublayer,
        }
        first = Layer(attention=pre, feed_forward=feed_forward[first_layer])
    return Plan(layers=(first,) + (rest,) * (num_layers - 1))
