"""KEEL Eq 14-19: log10 of the residual path's Jacobian norm, from the second block on.

The first block is left out: it has Keel's exceptions, and Post-LN's first norm scales the small embedding up.
"""

import math

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, close

PROBE = "jacobian(tokens=8, total=false)"


@claim(
    says="Before training, the Jacobian of the residual path after the first block is 1 in Keel (within 5 %). In "
    "Post-LN with L sub-layers after the first block, the Jacobian is 2^(-L/2) (its logarithm within 20 %)",
    paper="(1 + 1/L^2)^(-L/2) in Keel, which tends to 1, and 2^(-L/2) in Post-LN",
)
def keel_jacobian(trials: Trials) -> Finding:
    return all_of(keel_jacobian__keel(trials), keel_jacobian__post_ln(trials))


@claim(
    says="Before training, the Jacobian of Keel's residual path after the first block is 1 at every depth, within 5 %",
    paper="The Jacobian tends to 1",
)
def keel_jacobian__keel(trials: Trials) -> Finding:
    products = [10**log for log, _ in _products(trials, "keel", "residual_path")]
    return close(dict(enumerate(products)), 1.0, 0.05, name="keel: product", seeds=len(trials.seeds))


@claim(
    says="Before training, the Jacobian of Post-LN's residual path is 2^(-L/2) over the L sub-layers after the first "
    "block (its logarithm within 20 %)",
    paper="2^(-L/2)",
)
def keel_jacobian__post_ln(trials: Trials) -> Finding:
    finding = _to_formula(trials, "post_ln", "residual_path", 0.2)
    return finding.noted("the formula assumes branches as large as the skip; before training, the branches are smaller")


@claim(
    says="If each branch is as large as its skip, our models' gains and scales after the first block give the paper's "
    "formulas",
    paper="(1 + 1/L^2)^(-L/2) in Keel and 2^(-L/2) in Post-LN",
)
def keel_jacobian__formula(trials: Trials) -> Finding:
    return all_of(*(_to_formula(trials, placement, "keel", 1e-3) for placement in ("keel", "post_ln")))


def _to_formula(trials: Trials, placement: str, role: str, tolerance: float) -> Finding:
    """The logarithm over the formula's, which is the same per block: 1 where it holds."""
    ratios = []
    for log, blocks in _products(trials, placement, role):
        factor = 1 + 1 / (2 * blocks) ** 2 if placement == "keel" else 2.0
        ratios.append(log / (-(blocks - 1) * math.log10(factor)))
    name = f"{placement}: logarithm, divided by the formula's logarithm"
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
