"""Muse Spark's gate: each channel learns the branch's factor b, and the skip's factor is sqrt(1 - b^2)."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "muse_spark",
    title="Muse Spark",
    equation=(
        "y = sqrt(1 - b_1^2) * x + b_1 * LN(A(LN x))",
        "x' = sqrt(1 - b_2^2) * y + b_2 * LN(F(LN y))",
        "b = sigmoid(g / 0.3), with a learned vector g per sub-layer",
        "logits = W LN(x_N)",
    ),
    source="transformers' muse_spark (MuseSparkResidualGate)",
    advice="Meta's model draws the gate g from N(0, 0.02^2). In Lamina, the option `start` sets b's initial value.",
)
def muse_spark(num_layers: int, *, start: float = 0.5, temperature: float = 0.3) -> Plan:
    """If skip and branch are uncorrelated, the residual stream has the same variance at every depth.

    The norms on the modules' inputs have gains of 1 + w. The norms on the modules' outputs have no gains, because a
    gain would be another factor on the branch. (Meta's model has an output gain in the feed-forward.)

    Args:
        start: the initial value of the branch's factor b.
        temperature: the divisor of g in b = sigmoid(g / temperature). A smaller temperature acts like a higher learning
            rate for g.
    """
    sublayer = Sublayer(
        pre_norm=Norm(zero_centered=True),
        out_norm=Norm(learnable_gain=False),
        out_scale=start,
        out_scale_learned="vector",
        coupling="variance",
        gate_temperature=temperature,
    )
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())
