"""Admin: Post-LN with a learned vector on every skip. Measured variances set the vectors' initial values."""

from __future__ import annotations

import math
from typing import Literal

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "admin",
    title="Admin",
    equation=("y = LN(omega_1 * x + A(x))", "x' = LN(omega_2 * y + F(y))", "omega: one learned vector per sub-layer"),
    source="Liu et al. 2020 (arXiv 2004.08249) Eq 5; the package admin-torch for omega without profiling",
    initialization="admin",
    advice=(
        "Mix-LN's authors use the learning rate 1e-3 at 250M parameters, with 10 % warm-up. If the embedding "
        "starts with a standard deviation of 0.02, set embedding_norm=true. Without the embedding norm, all omegas "
        "except the first start near 0.02 instead of 1."
    ),
)
def admin(num_layers: int, *, omega: Literal["profiled", "log", "sqrt", "one"] = "profiled") -> Plan:
    """At the start, each skip is as strong as the sum of all earlier branches. So no branch dominates early training.

    Args:
        omega: the initial value of the learned vectors, in a model of n = 2 N sub-layers. With "profiled", the
            initializer admin measures the value in a forward pass. "log" is sqrt((n + 1) / ln(n + 1) - 1), "sqrt" is
            sqrt(n), and "one" is 1. With "log", "sqrt" and "one", use another initializer, such as normal.
    """
    n = 2 * num_layers
    start = {"profiled": 1.0, "log": math.sqrt((n + 1) / math.log(n + 1) - 1), "sqrt": math.sqrt(n), "one": 1.0}[omega]
    sublayer = Sublayer(post_norm=Norm(), skip_scale=start, skip_scale_learned="vector")
    return Plan(
        layers=(Layer.of(sublayer),) * num_layers,
        initialization="admin" if omega == "profiled" else "normal",
    )
