"""KEEL Eq 14-19: log10 of the residual path's Jacobian norm, from the second block on.

The first block is left out: it has Keel's exceptions, and Post-LN's first norm scales the small embedding up.
"""

import math

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, close

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
    products = [10**log for log, _ in _products(trials, "keel", "residual_path")]
    return close(dict(enumerate(products)), 1.0, 0.05, name="keel: product", seeds=len(trials.seeds))


@claim(says="Measured, Post-LN's falls as 2^(-L/2), its logarithm within 20 %", paper="2^(-L/2)")
def keel_jacobian__post_ln(trials: Trials) -> Finding:
    finding = _to_formula(trials, "post_ln", "residual_path", 0.2)
    return finding.noted("the formula takes branches as large as the skip; at the start they are smaller")


@claim(
    says="With branches as large as the skip, the gains and scales of the models as built give the paper's formulas",
    paper="(1 + 1/L^2)^(-L/2); 2^(-L/2)",
)
def keel_jacobian__formula(trials: Trials) -> Finding:
    return all_of(*(_to_formula(trials, placement, "keel", 1e-3) for placement in ("keel", "post_ln")))


def _to_formula(trials: Trials, placement: str, role: str, tolerance: float) -> Finding:
    """The logarithm over the formula's, which is the same per block: 1 where it holds."""
    ratios = []
    for log, blocks in _products(trials, placement, role):
        factor = 1 + 1 / (2 * blocks) ** 2 if placement == "keel" else 2.0
        ratios.append(log / (-(blocks - 1) * math.log10(factor)))
    name = f"{placement}: logarithm over the formula's"
    return close(dict(enumerate(ratios)), 1.0, tolerance, name=name, seeds=len(trials.seeds))


def _products(trials: Trials, placement: str, role: str) -> list[tuple[float, int]]:
    """Of each model, log10 of the product over the blocks but the first, and the number of blocks."""
    table: Frame = trials.where(placement=placement).measure(PROBE, at="init")
    table = table[(table["sublayer"] == "block") & (table["role"] == role) & (table["metric"] == "log10_product")]
    logs = []
    for (_, depth), rows in table.groupby(["key", "num_layers"]):
        by_layer = rows.sort_values("layer")["value"]
        logs.append((float(by_layer.iloc[-1] - by_layer.iloc[0]), int(depth)))
    return logs
