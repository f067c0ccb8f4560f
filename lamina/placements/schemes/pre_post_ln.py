"""Pre-Post-LN: a norm on each module's input and on each sum (A and C in the Peri-LN paper's Figure 2)."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "pre_post_ln",
    title="Pre-Post-LN",
    equation=("y = LN(x + A(LN x))", "x' = LN(y + F(LN y))"),
    source="Peri-LN (arXiv 2502.02732) Table 5, positions A + C",
    initialization="normal",
    advice=(
        "The Peri-LN paper uses a learning rate of 2e-3 with 10 % warm-up. In the paper, Pre-Post-LN was "
        "as good as Post-LN."
    ),
)
def pre_post_ln(num_layers: int) -> Plan:
    """Pre-Post-LN is Post-LN with a second norm, on each branch's input."""
    sublayer = Sublayer(pre_norm=Norm(), post_norm=Norm())
    layer = Layer.of(sublayer)
    return Plan(layers=(layer,) * num_layers)
