"""Sandwich-LN: CogView's norms on both sides of each module."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "sandwich_ln",
    title="Sandwich-LN",
    equation=("y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "logits = W LN(x_N)"),
    source="CogView (arXiv 2105.13290) Sec 2.4",
    advice=(
        "Mix-LN's authors use the learning rate 1e-3 at 250M parameters, with 10 % warm-up. Sandwich-LN is "
        "Peri-LN without the norm on the embedding."
    ),
)
def sandwich_ln(num_layers: int) -> Plan:
    """CogView uses Sandwich-LN to keep a text-to-image model's fp16 activations in range."""
    sublayer = Sublayer(pre_norm=Norm(), out_norm=Norm())
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())


@placement(
    "sandwich_depth_scaled",
    title="Depth-scaled Sandwich-LN",
    equation=("y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "outer gains start at c / sqrt(N)", "logits = W LN(x_N)"),
    source="Pangu Ultra (arXiv 2504.07866); Arcee Trinity (arXiv 2602.17004)",
    advice="Arcee Trinity uses c = 1 and reports no loss spike in 17 trillion tokens at 400B parameters.",
)
def sandwich_depth_scaled(num_layers: int, *, c: float = 1.0) -> Plan:
    """Depth-scaled Sandwich-LN starts with small branches, so the residual stream's variance does not grow with depth.

    Args:
        c: the constant in the initial gain of the outer norms, c / sqrt(N), with N blocks.
    """
    sublayer = Sublayer(pre_norm=Norm(), out_norm=Norm(initial_gain=c * num_layers**-0.5))
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())
