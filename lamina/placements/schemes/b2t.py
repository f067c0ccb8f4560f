"""B2T: Post-LN with a skip from a block's bottom to its top."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "b2t",
    title="B2T connection",
    equation=("y = LN(x + A(x))", "x' = LN(x + y + F(y))"),
    source="Takase et al. 2022 (arXiv 2206.00330) Sec 4",
    initialization="normal",
    advice="Start from Post-LN's learning rates and warm-up. The B2T paper trains translation models.",
)
def b2t(num_layers: int) -> Plan:
    """A second skip connects the block's input to its output. It bypasses all norms of the block except the last."""
    layer = Layer(attention=Sublayer(post_norm=Norm()), feed_forward=Sublayer(skip="both", post_norm=Norm()))
    return Plan(layers=(layer,) * num_layers)
