"""LayerScale: Pre-LN with a small learned vector on every branch."""

from __future__ import annotations

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "layerscale",
    title="LayerScale",
    equation=("y = x + lambda_1 * A(LN x)", "x' = y + lambda_2 * F(LN y)", "logits = W LN(x_N)"),
    source="CaiT (arXiv 2103.17239) Sec 2; DINOv2, ConvNeXt, BEiT",
    advice=(
        "CaiT starts the factors at 0.1 for up to 18 blocks, at 1e-5 for up to 24 blocks, and at 1e-6 for more. "
        "DINOv2 starts the factors at 1e-5, and BEiT at 0.1."
    ),
)
def layerscale(num_layers: int, *, start: float | None = None) -> Plan:
    """Each channel of a branch has a small learned factor, so that a deep network starts near the identity.

    Args:
        start: the initial value of the factors (default: CaiT's value for the depth).
    """
    if start is None:
        start = 0.1 if num_layers <= 18 else 1e-5 if num_layers <= 24 else 1e-6
    sublayer = Sublayer(pre_norm=Norm(), out_scale=start, out_scale_learned="vector")
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())
