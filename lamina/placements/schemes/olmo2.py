"""OLMo 2 and Output-LN: a norm on each module's output (position B in the Peri-LN paper's Figure 2)."""

from __future__ import annotations

from lamina.placements.plan import HeadNorm, Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


def _plan(num_layers: int, qk_norm: HeadNorm = "off") -> Plan:
    sublayer = Sublayer(out_norm=Norm())
    layer = Layer.of(sublayer)
    return Plan(layers=(layer,) * num_layers, final_norm=Norm(), qk_norm=qk_norm)


@placement(
    "olmo2",
    title="OLMo 2",
    equation=(
        "y = x + LN(A(x))",
        "x' = y + LN(F(y))",
        "A: norms on q and k, over the full width",
        "logits = W LN(x_N)",
    ),
    source="OLMo 2 (arXiv 2501.00656) Sec 3.2",
    initialization="normal",
    advice="FuseNorm's authors use a learning rate of 2e-4 at 5B parameters, with 200 steps of warm-up.",
)
def olmo2(num_layers: int) -> Plan:
    """OLMo 2 normalizes each module's output, not the input. Norms on queries and keys act over the full width."""
    return _plan(num_layers, qk_norm="full")


@placement(
    "out_ln",
    title="Output-LN",
    equation=("y = x + LN(A(x))", "x' = y + LN(F(y))", "logits = W LN(x_N)"),
    source="Peri-LN (arXiv 2502.02732) Table 5, position B",
    initialization="normal",
    advice=("The Peri-LN paper uses a learning rate of 2e-3 with 10 % warm-up. In the paper, Output-LN diverged."),
)
def out_ln(num_layers: int) -> Plan:
    """Output-LN is OLMo 2's placement without the norms on queries and keys (position B in the Peri-LN paper)."""
    return _plan(num_layers)
