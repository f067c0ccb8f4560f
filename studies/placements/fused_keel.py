"""FuseNorm's skip with Keel's inner norm and scale."""

from typing import Literal

from lamina.placements import Layer, Norm, Plan, Sublayer, placement


@placement(
    "fused_keel",
    title="FuseNorm's skip in Keel",
    equation=(
        "y = LN(alpha x + A(LN x))",
        "x' = LN(alpha x + F(LN y))",
        "block 1:  y = x + A(LN x),  x' = LN(x + F(LN y))",
    ),
    source="FuseNorm Eq 5-8 and Keel Sec 4, combined",
    initialization="scaled",
)
def fused_keel(num_layers: int, *, alpha: Literal["root", "blocks", "sublayers"] = "blocks") -> Plan:
    """One norm per block stands on the residual path, so alpha = N should do where Keel needs 2 N.

    Args:
        alpha: the constant on the skips: the root of the number of blocks, that number, or that of sub-layers.
    """
    scale = {"root": num_layers**0.5, "blocks": float(num_layers), "sublayers": 2.0 * num_layers}[alpha]
    norms = {"pre_norm": Norm(), "post_norm": Norm()}
    rest = Layer(
        attention=Sublayer(**norms, skip_scale=scale),
        feed_forward=Sublayer(**norms, skip="block_input", skip_scale=scale),
    )
    first = Layer(attention=Sublayer(pre_norm=Norm()), feed_forward=Sublayer(**norms, skip="block_input"))
    return Plan(layers=(first,) + (rest,) * (num_layers - 1))
