"""Peri-LN: norms on both sides of each module (also Gemma 2's and Gemma 3's placement)."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "peri_ln",
    title="Peri-LN",
    equation=("x_0 = LN(E)", "y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "logits = W LN(x_N)"),
    source="Peri-LN (arXiv 2502.02732) Sec 3.3; Gemma Team 2024 (arXiv 2408.00118)",
    initialization="normal",
    advice=(
        "The paper's peak learning rate is 2e-3 at 400M parameters, with 10 % warm-up. The paper uses weight decay "
        "0.033."
    ),
)
def peri_ln(num_layers: int, *, embedding_norm: bool = True, learnable_gain: bool = True) -> Plan:
    """A norm on each module's output bounds the branch. So the residual stream's variance grows linearly with
    depth (Eq 4).

    Args:
        embedding_norm: a norm on the embedding (y_0 = Norm(x_0)), as in the paper's main runs.
        learnable_gain: whether the output norms have learned gains. If false, these gains stay at 1 (Fig 8).
    """
    sublayer = Sublayer(pre_norm=Norm(), out_norm=Norm(learnable_gain=learnable_gain))
    layer = Layer.of(sublayer)
    return Plan(
        layers=(layer,) * num_layers,
        final_norm=Norm(),
        embedding_norm=Norm() if embedding_norm else None,
    )
