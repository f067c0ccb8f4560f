"""Doge: Pre-LN with a learned vector on every skip."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "doge",
    title="Doge",
    equation=("y = w_1 * x + A(LN x)", "x' = w_2 * y + F(LN y)", "w = 1 at the start, learned", "logits = W LN(x_N)"),
    source="transformers' doge (input_residual, post_attention_residual)",
    advice="The placement covers Doge's norms and scales. Doge's dynamic-mask attention belongs to the backbone.",
)
def doge(num_layers: int) -> Plan:
    """A learned factor multiplies each channel of the residual stream before every sum."""
    sublayer = Sublayer(pre_norm=Norm(), skip_scale_learned="vector")
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())
