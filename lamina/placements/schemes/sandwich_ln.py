"""Sandwich-LN: CogView's norms on both sides of each module."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "sandwich_ln",
    title="Sandwich-LN",
    equation=("y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "logits = W LN(x_N)"),
    source="CogView (arXiv 2105.13290) Sec 2.4",
    initialization="normal",
    advice="Mix-LN's baseline at 250M: learning rate 1e-3, warm-up 10 %",
)
def sandwich_ln(num_layers: int) -> Plan:
    """Peri-LN's wiring, published for another purpose: it keeps fp16 activations of a text-to-image model in range."""
    sublayer = Sublayer(pre_norm=Norm(), out_norm=Norm())
    layer = Layer.of(sublayer)
    return Plan(layers=(layer,) * num_layers, final_norm=Norm())
