"""KEEL Eq 14-19: log10 of the residual path's Jacobian norm, from the second block on.

The first block is left out: it has Keel's exceptions, and Post-LN's first norm scales the small embedding up.
"""

import math

from lamina.core.frames import Frame
from lamina.studies.judging import Finding, Trials, all_of, claim, close

PROBE = "jacobian(tokens=8, total=false)"


@claim(
    says="Measured by autograd at the start, the residual path's Jacobian is 1 in Keel, within 5 %, and falls as "
    "2^(-L/2) in Post-LN, its logarithm within 20 %",
    paper="(1 + 1/L^2)^(-L/2), which tends to 1; 2^(-L/2)",
)
def keel_jacobian(trials: Trials) -> Finding:
    return all_of(keel_jacobian__keel(trials), keel_jacobian__post_ln(trials))


@claim(says="Measured, Keel's is 1 within 5 % at every depth", paper="tends to 1")
def keel_jacobian__keel(trials: Trials) -> Finding:
    found = _products(trials, "keel", "residual_path")
    return all_of(
        *(
            close({seed: 10**log for seed, log in enumerate(logs)}, 1.0, 0.05, name=f"keel, {name}:")
            for (name, _), logs in found.items()
        )
    )


@claim(says="Measured, Post-LN's falls as 2^(-L/2), its logarithm within 20 %", paper="2^(-L/2)")
def keel_jacobian__post_ln(trials: Trials) -> Finding:
    found = _products(trials, "post_ln", "residual_path")
    return all_of(
        *(
            close(dict(enumerate(logs)), -(blocks - 1) * math.log10(2), 0.2, name=f"post_ln, {name}: log10")
            for (name, blocks), logs in found.items()
        )
    ).noted("the formula takes branches as large as the skip; at the start they are smaller")


@claim(
    says="With branches as large as the skip, the gains and scales of the models as built give the paper's formulas",
    paper="(1 + 1/L^2)^(-L/2); 2^(-L/2)",
)
def keel_jacobian__formula(trials: Trials) -> Finding:
    findings = []
    for (name, blocks), logs in _products(trials, "keel", "keel").items():
        expected = -(blocks - 1) * math.log10(1 + 1 / (2 * blocks) ** 2)
        findings.append(close(dict(enumerate(logs)), expected, 1e-3, name=f"keel, {name}: log10"))
    for (name, blocks), logs in _products(trials, "post_ln", "keel").items():
        expected = -(blocks - 1) * math.log10(2)
        findings.append(close(dict(enumerate(logs)), expected, 1e-3, name=f"post_ln, {name}: log10"))
    return all_of(*findings)


def _products(trials: Trials, placement: str, role: str) -> dict[tuple[str, int], list[float]]:
    """By initializer and depth, log10 of the product over the blocks but the first, one number per seed."""
    table: Frame = trials.where(placement=placement).measure(PROBE, at="init")
    table = table[(table["sublayer"] == "block") & (table["role"] == role) & (table["metric"] == "log10_product")]
    found: dict[tuple[str, int], list[float]] = {}
    for (init, depth, _), rows in table.groupby(["init", "num_layers", "seed"]):
        by_layer = rows.sort_values("layer")["value"]
        found.setdefault((f"{init}, {depth} blocks", int(depth)), []).append(by_layer.iloc[-1] - by_layer.iloc[0])
    return found
