"""SubLN: Pre-LN with a second norm inside each module, before the module's last projection."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "subln",
    title="SubLN",
    equation=(
        "y = x + A'(LN x)",
        "x' = y + F'(LN y)",
        "A', F': a norm before the last projection",
        "logits = W LN(x_N)",
    ),
    source="Magneto (arXiv 2210.06423) Sec 3; transformers' bitnet",
    advice="Magneto scales the initial weights by sqrt(log(2 N)). Lamina does not have Magneto's initializer.",
)
def subln(num_layers: int) -> Plan:
    """Each module's last projection reads normed channels, so only this projection sets the scale of the output."""
    sublayer = Sublayer(pre_norm=Norm(), inner_norm=Norm())
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())
