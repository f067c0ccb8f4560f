"""ReZero and SkipInit: one learned number on every branch, and no norms."""

from typing import Literal

from lamina.placements.plan import Layer, Plan, Sublayer
from lamina.placements.registry import placement


def _plan(num_layers: int, start: float) -> Plan:
    return Plan(layers=(Layer.of(Sublayer(out_scale=start, out_scale_learned="scalar")),) * num_layers)


@placement(
    "rezero",
    title="ReZero",
    equation=("y = x + a_1 A(x)", "x' = y + a_2 F(y)", "a = 0 at the start, learned"),
    source="ReZero (arXiv 2003.04887) Sec 5",
    advice="The paper uses no warm-up. No norm limits the logits. To add a norm before the output head, set "
    "final_norm=true.",
)
def rezero(num_layers: int) -> Plan:
    """Every block starts as the identity, because each branch's learned gate starts at 0. In the paper, both
    sub-layers of a block share one gate.
    """
    return _plan(num_layers, 0.0)


@placement(
    "skipinit",
    title="SkipInit",
    equation=("y = x + a_1 A(x)", "x' = y + a_2 F(y)", "a = (2 N)^(-1/2) at the start, learned"),
    source="De & Smith 2020 (arXiv 2002.10444) Sec 3",
    advice=(
        "The authors propose SkipInit for residual networks without batch norm. No norm limits the logits. To add a "
        "norm before the output head, set final_norm=true."
    ),
)
def skipinit(num_layers: int, *, start: Literal["depth", "zero"] = "depth") -> Plan:
    """SkipInit is ReZero with gates that start at 1 / sqrt(2 N). Batch norm scales a branch by a similar factor.

    Args:
        start: the initial value of the gates. "depth" is 1 / sqrt(2 N) in a model of 2 N sub-layers. "zero" is 0, as in
            ReZero. The paper uses both values.
    """
    return _plan(num_layers, (2 * num_layers) ** -0.5 if start == "depth" else 0.0)
