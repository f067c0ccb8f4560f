"""Group-LN: Pre-LN with norms that normalize each group of a token's channels separately."""

from __future__ import annotations

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "group_ln",
    title="Group-LN",
    equation=(
        "y = x + A(GN x)",
        "x' = y + F(GN y)",
        "GN: RMSNorm over each of G groups of channels",
        "logits = W GN(x_N)",
    ),
    source="Wu & He 2018 (arXiv 1803.08494); a baseline in Table 6 of Mix-LN, which gives no name for this variant",
    initialization="normal",
    advice=(
        "Mix-LN's authors use the learning rate 1e-3 at 250M parameters, with 10 % warm-up. The number of groups "
        "must divide the hidden size."
    ),
)
def group_ln(num_layers: int, *, groups: int = 8) -> Plan:
    """Each norm normalizes groups of one token's channels. So no token depends on a later token.

    Args:
        groups: the number of groups, which must divide the hidden size.
    """
    norm = Norm(kind="group", groups=groups)
    layer = Layer.of(Sublayer(pre_norm=norm))
    return Plan(layers=(layer,) * num_layers, final_norm=norm)
