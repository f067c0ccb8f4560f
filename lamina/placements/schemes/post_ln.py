"""Post-LN: the original Transformer (Vaswani et al. 2017)."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "post_ln",
    title="Post-LN",
    equation=("y = LN(x + A(x))", "x' = LN(y + F(y))"),
    source="Vaswani et al. 2017 (arXiv 1706.03762); FuseNorm Eq 1-2",
    initialization="normal",
    advice=(
        "The largest stable learning rate is 3.0e-4 at 64 layers (Keel Table 1). Mix-LN's authors use 10 % warm-up. "
        "Deep Post-LN models get stuck."
    ),
)
def post_ln(num_layers: int) -> Plan:
    """Post-LN has a norm after every sum. In the backward pass, every norm shrinks the gradient."""
    sublayer = Sublayer(post_norm=Norm())
    layer = Layer.of(sublayer)
    return Plan(layers=(layer,) * num_layers)
