"""Placements whose norms stand at the same positions in every sub-layer (A, B, C in the Peri-LN paper's Figure 2)."""

from __future__ import annotations

from dataclasses import replace

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "pre_ln",
    title="Pre-LN",
    equation=("y = x + A(LN x)", "x' = y + F(LN y)", "logits = W LN(x_N)"),
    source="Xiong et al. 2020 (arXiv 2002.04745); FuseNorm Eq 3-4",
    advice="2e-3 with 10 % warm-up in Peri-LN; largest stable rate 7.65e-3 at 64, 4.67e-3 at 512 layers (Keel Table 1)",
)
def pre_ln(num_layers: int) -> Plan:
    """The stream itself is never normalized, which keeps an identity path from the loss to every layer."""
    return Plan(layers=(Layer.of(Sublayer(pre_norm=Norm())),) * num_layers, final_norm=Norm())


@placement(
    "post_ln",
    title="Post-LN",
    equation=("y = LN(x + A(x))", "x' = LN(y + F(y))"),
    source="Vaswani et al. 2017 (arXiv 1706.03762); FuseNorm Eq 1-2",
    advice="largest stable rate 3.0e-4 at 64 layers (Keel Table 1), warm-up 10 % in Mix-LN; when deep it sticks",
)
def post_ln(num_layers: int) -> Plan:
    """Every sum is normalized; the gradient shrinks by the norm's Jacobian at each sub-layer on its way down."""
    return Plan(layers=(Layer.of(Sublayer(post_norm=Norm())),) * num_layers)


@placement(
    "pre_post_ln",
    title="Pre-Post-LN (A + C)",
    equation=("y = LN(x + A(LN x))", "x' = LN(y + F(LN y))"),
    source="Peri-LN (arXiv 2502.02732) Table 5, positions A + C",
    advice="learning rate 2e-3, warm-up 10 % in the Peri-LN paper, where it was level with Post-LN",
)
def pre_post_ln(num_layers: int) -> Plan:
    """Post-LN with a norm inside the branch: Keel without its alpha and its first layer."""
    return Plan(layers=(Layer.of(Sublayer(pre_norm=Norm(), post_norm=Norm())),) * num_layers)


@placement(
    "sandwich_ln",
    title="Sandwich-LN",
    equation=("y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "logits = W LN(x_N)"),
    source="CogView (arXiv 2105.13290) Sec 2.4",
    advice="Mix-LN's baseline at 250M: learning rate 1e-3, warm-up 10 %",
)
def sandwich_ln(num_layers: int) -> Plan:
    """Peri-LN's wiring, published for another purpose: it keeps fp16 activations of a text-to-image model in range."""
    return Plan(layers=(Layer.of(Sublayer(pre_norm=Norm(), out_norm=Norm())),) * num_layers, final_norm=Norm())


@placement(
    "olmo2",
    title="OLMo 2",
    equation=("y = x + LN(A(x))", "x' = y + LN(F(y))", "A: norms on q and k, full width", "logits = W LN(x_N)"),
    source="OLMo 2 (arXiv 2501.00656) Sec 3.2",
    advice="FuseNorm's baseline at 5B: learning rate 2e-4, 200 steps of warm-up",
)
def olmo2(num_layers: int) -> Plan:
    """The norm stands on each module's output, none on its input; queries and keys are normed over their full width."""
    return replace(out_ln(num_layers), qk_norm="full")


@placement(
    "out_ln",
    title="Output-LN",
    equation=("y = x + LN(A(x))", "x' = y + LN(F(y))", "logits = W LN(x_N)"),
    source="Peri-LN (arXiv 2502.02732) Table 5, position B",
    advice="learning rate 2e-3, warm-up 10 % in the Peri-LN paper, where it diverged",
)
def out_ln(num_layers: int) -> Plan:
    """OLMo 2's wiring without its norms on queries and keys: position B alone."""
    return Plan(layers=(Layer.of(Sublayer(out_norm=Norm())),) * num_layers, final_norm=Norm())


@placement(
    "peri_ln",
    title="Peri-LN",
    equation=("x_0 = LN(E)", "y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "logits = W LN(x_N)"),
    source="Peri-LN (arXiv 2502.02732) Sec 3.3; Gemma Team 2024 (arXiv 2408.00118)",
    advice="peak learning rate 2e-3 at 400M in the paper, warm-up 10 %, weight decay 0.033",
)
def peri_ln(num_layers: int, *, embedding_norm: bool = True, learnable_gain: bool = True) -> Plan:
    """The norm on a module's output bounds what the module adds, so the variance grows linearly in depth (Eq 4).

    Args:
        embedding_norm: a norm on the embedding (y_0 = Norm(x_0)); the paper's main runs have it.
        learnable_gain: the gains of the output norms are learned; false fixes them at 1 (Fig 8).
    """
    layer = Layer.of(Sublayer(pre_norm=Norm(), out_norm=Norm(learnable_gain=learnable_gain)))
    return Plan(layers=(layer,) * num_layers, final_norm=Norm(), embedding_norm=Norm() if embedding_norm else None)


@placement(
    "group_ln",
    title="Group-LN",
    equation=(
        "y = x + A(GN x)",
        "x' = y + F(GN y)",
        "GN: RMSNorm over each of G groups of channels",
        "logits = W GN(x_N)",
    ),
    source="Wu & He 2018 (arXiv 1803.08494); a baseline of Mix-LN Table 6, which does not say which variant it is",
    advice="Mix-LN's baseline at 250M: learning rate 1e-3, warm-up 10 %",
)
def group_ln(num_layers: int, *, groups: int = 8) -> Plan:
    """The causal reading of a group norm: statistics of one token only. Megalodon's accumulates them over time instead.

    Args:
        groups: parts of equal width; must divide the hidden size.
    """
    norm = Norm(kind="group", groups=groups)
    return Plan(layers=(Layer.of(Sublayer(pre_norm=norm)),) * num_layers, final_norm=norm)


@placement(
    "layernorm_scaling",
    title="LayerNorm Scaling",
    equation=(
        "y = x + A(LN(x) / sqrt(l))",
        "x' = y + F(LN(y) / sqrt(l))",
        "l = 1 .. N, the block",
        "logits = W LN(x_N)",
    ),
    source="LayerNorm Scaling (arXiv 2502.05795) Eq 5",
    advice="learning rate 1e-3 to 350M, 5e-4 at 1B, warm-up 10 %; its authors say the scaled init weakens the effect",
)
def layernorm_scaling(num_layers: int) -> Plan:
    """The factor stands on the norm's output, so deep layers read a smaller input; the final norm is not scaled."""
    layers = (Layer.of(Sublayer(pre_norm=Norm(), pre_scale=index**-0.5)) for index in range(1, num_layers + 1))
    return Plan(layers=tuple(layers), final_norm=Norm())
