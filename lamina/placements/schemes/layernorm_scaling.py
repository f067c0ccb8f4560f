"""LayerNorm Scaling: Pre-LN with a factor on each norm's output. The factor is smaller in deeper layers."""

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
    """A factor shrinks the norms' outputs in deeper layers, so these layers read smaller inputs."""
    sublayers = [Sublayer(pre_norm=Norm(), pre_scale=index**-0.5) for index in range(1, num_layers + 1)]
    layers = tuple(Layer.of(sublayer) for sublayer in sublayers)
    return Plan(layers=layers, final_norm=Norm())
