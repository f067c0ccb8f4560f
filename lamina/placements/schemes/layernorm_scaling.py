"""LayerNorm Scaling: Pre-LN whose norms' outputs shrink with depth."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "layernorm_scaling",
    title="LayerNorm Scaling",
    equation=(
        "y = x + A(LN(x) / sqrt(l + 1))",
        "x' = y + F(LN(y) / sqrt(l + 1))",
        "l = 0 .. N - 1, the block",
        "logits = W LN(x_N)",
    ),
    source="LayerNorm Scaling (arXiv 2502.05795) Eq 5",
    initialization="normal",
    advice=(
        "The paper uses a learning rate of 1e-3 for up to 350M parameters and 5e-4 for 1B parameters, with 10 % "
        "warm-up. The authors say that the scaled initializer weakens LayerNorm Scaling."
    ),
)
def layernorm_scaling(num_layers: int) -> Plan:
    """A factor shrinks norm outputs with depth, so deep layers read smaller inputs. The final norm has no factor."""
    sublayers = [Sublayer(pre_norm=Norm(), pre_scale=index**-0.5) for index in range(1, num_layers + 1)]
    layers = tuple(Layer.of(sublayer) for sublayer in sublayers)
    return Plan(layers=layers, final_norm=Norm())
