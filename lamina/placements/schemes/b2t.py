"""B2T: Post-LN with a second skip, from the bottom of a block to the top."""

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
    """A second skip leads from a block's input to the block's last sum. Only the last norm acts on this skip."""
    layer = Layer(attention=Sublayer(post_norm=Norm()), feed_forward=Sublayer(skip="both", post_norm=Norm()))
    return Plan(layers=(layer,) * num_layers)
