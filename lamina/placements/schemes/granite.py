"""Granite, HyperCLOVA X and MiniCPM: a constant factor on every branch. MiniCPM's factor depends on the depth."""

import math

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "granite",
    title="Granite",
    equation=("y = x + c A(LN x)", "x' = y + c F(LN y)", "logits = W LN(x_N)"),
    source="transformers' granite, hyperclovax (residual_multiplier)",
    advice="Granite 3 uses c = 0.22 at 40 layers. HyperCLOVA X also has output norms (out_norm=true).",
)
def granite(num_layers: int, *, multiplier: float = 0.22, out_norm: bool = False) -> Plan:
    """Granite is Pre-LN with one constant factor on all branches.

    Args:
        multiplier: the constant c, equal in all layers.
        out_norm: a norm on each module's output, before the factor.
    """
    sublayer = Sublayer(pre_norm=Norm(), out_norm=Norm() if out_norm else None, out_scale=multiplier)
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())


@placement(
    "minicpm",
    title="MiniCPM",
    equation=("y = x + c / sqrt(N) A(LN x)", "x' = y + c / sqrt(N) F(LN y)", "logits = W LN(x_N)"),
    source="MiniCPM (arXiv 2404.06395) Table 7 (scale_depth); depth-muP (arXiv 2310.02244)",
    advice="The paper uses c = 1.4, muP's width scaling and a warm-up-stable-decay schedule.",
)
def minicpm(num_layers: int, *, scale_depth: float = 1.4) -> Plan:
    """MiniCPM multiplies every branch of Pre-LN by c / sqrt(N). So the sum of all branches does not grow with depth.

    Args:
        scale_depth: the constant c.
    """
    sublayer = Sublayer(pre_norm=Norm(), out_scale=scale_depth / math.sqrt(num_layers))
    return Plan(layers=(Layer.of(sublayer),) * num_layers, final_norm=Norm())
