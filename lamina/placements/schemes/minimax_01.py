"""MiniMax-01: DeepNorm's norms and scales, with a norm on the embedding."""

from __future__ import annotations

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "minimax_01",
    title="MiniMax-01",
    equation=(
        "x_0 = LN(E)",
        "y = LN(alpha x + beta A(x))",
        "x' = LN(alpha y + beta F(y))",
        "alpha = (2 N)^(1/4), beta = 1",
    ),
    source="MiniMax-01 (arXiv 2501.08313) Sec 2; transformers' minimax",
    initialization="deepnorm",
    advice="MiniMax-01 has 80 layers and alpha = 3.5566. The last norm of the last block acts as the final norm.",
)
def minimax_01(num_layers: int, *, alpha: float | None = None, beta: float = 1.0) -> Plan:
    """The skip carries the normed residual stream, multiplied by DeepNorm's alpha.

    Args:
        alpha: the constant on the skip (default: the fourth root of the number of sub-layers).
        beta: the constant on the branch.
    """
    skip_scale = (2 * num_layers) ** 0.25 if alpha is None else alpha
    sublayer = Sublayer(post_norm=Norm(), skip_scale=skip_scale, out_scale=beta, weight_gain=(8 * num_layers) ** -0.25)
    return Plan(layers=(Layer.of(sublayer),) * num_layers, embedding_norm=Norm())
