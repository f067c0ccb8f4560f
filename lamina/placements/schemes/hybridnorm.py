"""HybridNorm and HybridNorm*: norms on q, k and v, and one norm before the feed-forward and its skip."""

from __future__ import annotations

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement

_SOURCE = "HybridNorm (arXiv 2503.04598) Sec 3.2"
_ADVICE = "The paper's peak learning rate is 3e-4 at 550M to 1.2B parameters. The learning rate decays to 3e-5."
# The norm after the attention's sum gives both the feed-forward's input and the feed-forward's skip.
_ATTENTION, _FEED_FORWARD = Sublayer(post_norm=Norm()), Sublayer()


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
    source=_SOURCE,
    initialization="small_scaled",
    advice=_ADVICE,
)
def hybridnorm(num_layers: int) -> Plan:
    """HybridNorm has norms inside the attention and before the feed-forward. The feed-forward's skip is also normed."""
    layer = Layer(attention=_ATTENTION, feed_forward=_FEED_FORWARD)
    return Plan(layers=(layer,) * num_layers, final_norm=Norm(), qk_norm="head", v_norm="head")


@placement(
    "hybridnorm_star",
    title="HybridNorm*",
    equation=(
        "y = x + A_qkv(x)",
        "z = LN(y)",
        "x' = z + F(z)",
        "block 0:  y = x + A_qkv(LN x),  x' = y + F(LN y)",
        "logits = W LN(x_N)",
    ),
    source=_SOURCE + ", Eq 10",
    initialization="small_scaled",
    advice=_ADVICE,
)
def hybridnorm_star(num_layers: int) -> Plan:
    """HybridNorm* is HybridNorm with a Pre-LN block as the first block. This block also has norms on q, k and v."""
    pre = Sublayer(pre_norm=Norm())
    first = Layer.of(pre)
    rest = Layer(attention=_ATTENTION, feed_forward=_FEED_FORWARD)
    layers = (first,) + (rest,) * (num_layers - 1)
    return Plan(layers=layers, final_norm=Norm(), qk_norm="head", v_norm="head")
