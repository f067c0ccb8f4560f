"""Pre-LN: the norm on each module's input (GPT-2, Llama)."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "pre_ln",
    title="Pre-LN",
    equation=("y = x + A(LN x)", "x' = y + F(LN y)", "logits = W LN(x_N)"),
    source="Xiong et al. 2020 (arXiv 2002.04745); FuseNorm Eq 3-4",
    initialization="normal",
    advice=(
        "The Peri-LN paper uses a learning rate of 2e-3 with 10 % warm-up. The largest stable learning rate is "
        "7.65e-3 at 64 layers and 4.67e-3 at 512 layers (Keel Table 1)."
    ),
)
def pre_ln(num_layers: int) -> Plan:
    """No block normalizes the residual stream, so an identity path leads from the final norm to every layer."""
    sublayer = Sublayer(pre_norm=Norm())
    layer = Layer.of(sublayer)
    return Plan(layers=(layer,) * num_layers, final_norm=Norm())
