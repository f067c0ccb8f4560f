"""FuseNorm's Theorem 1 and the equations around it."""

from functools import partial

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, below, claim, fraction
from lamina.lab.papers.judging.curves import BySeed, along, exponents, layer_means, numbers, power, rows

SCALED, PLAIN, PRE = ({"start": start} for start in ("fusenorm scaled", "fusenorm plain", "pre_ln"))


def _side(role: str, metric: str, **where: object):
    def value(table: Frame) -> float:
        return float(rows(table, role=role, metric=metric, **where)["value"].mean())

    return value


def variance_exponent(trials: Trials, arm: dict[str, str], sublayer: str) -> BySeed:
    """By seed the exponent e of Var(F) ~ L^e over models of several depths, F the sub-layer's branch."""
    value = _side("fusenorm_eq_21", "left", layer=-1, sublayer=sublayer)
    depths = along(trials, "num_layers")
    return exponents({depth: numbers(at, arm, "bounds", value, at="init") for depth, at in depths})


def identity_slope(table: Frame, over: str) -> float:
    """The slope of log ||J - I|| over log sigma or over log(l + 1), of the blocks behind the first quarter."""
    sides = {metric: layer_means(rows(table, role="fusenorm_eq_9", metric=metric)) for metric in ("left", "right")}
    distance = sides["left"].iloc[len(sides["left"]) // 4 :]
    if over == "depth":
        return power({layer + 1: value for layer, value in distance.items()})
    return power({1 / sides["right"][layer]: value for layer, value in distance.items()})  # its right side is c / sigma


@claim(
    says="With the scaled initializer, the variance of FuseNorm's branches is proportional to 1 / L in models of L "
    "blocks. With the plain initializer, this variance is not proportional to 1 / L",
    paper="Eq 13 and 21: Var(F) = O(1 / L)",
    quantity="exponent of L",
)
def fuse_theorem(trials: Trials) -> Finding:
    """Exponents of the depth: below -0.8 for the feed-forward and the attention, above -0.2 with the plain one."""
    falls = [
        below(variance_exponent(trials, SCALED, s), -0.8, name=f"{s}, scaled:") for s in ("feed_forward", "attention")
    ]
    return all_of(*falls, above(variance_exponent(trials, PLAIN, "feed_forward"), -0.2, name="feed_forward, plain:"))


@claim(
    says="In deep layers of Pre-LN, the Jacobian of a block is close to the identity. In layer l, the distance to "
    "the identity falls as 1 / sigma_l and as 1 / sqrt(l)",
    paper="Eq 9: exponents -1 and -1/2",
)
def fuse_theorem__identity(trials: Trials) -> Finding:
    """Slopes over the deepest model's blocks behind its first quarter, within 0.3 of -1 and 0.2 of -1/2.

    The statement is about large l: in the first blocks the embedding's own variance is as large as the branches'.
    """
    deepest = list(along(trials, "num_layers"))[-1][1]
    checks = []
    for over, expected, tolerance in (("sigma", -1.0, 0.3), ("depth", -0.5, 0.2)):
        slopes = numbers(deepest, PRE, "bounds", partial(identity_slope, over=over), at="init")
        name = f"slope over log {over}"
        checks += [above(slopes, expected - tolerance, name=name), below(slopes, expected + tolerance, name=name)]
    return all_of(*checks)


@claim(
    says="The Jacobians of FuseNorm's blocks stay below the bound of Eq 19, and below the exact bound of the chain "
    "rule",
    paper="Eq 16 to 19: an approximate upper bound",
)
def fuse_theorem__bound(trials: Trials) -> Finding:
    """In all blocks for the chain rule, which is exact, and in 19 of 20 for the approximation."""
    tables = [trials.arm(arm).measure("bounds", at="init") for arm in (SCALED, PLAIN)]
    checks, seeds = [], len(trials.seeds)
    for role, share in (("fusenorm_eq_19_chain", 1.0), ("fusenorm_eq_19", 0.95)):
        ratios = [ratio for table in tables for ratio in rows(table, role=role, metric="ratio")["value"]]
        name = "blocks below the chain rule" if share == 1.0 else "blocks below Eq 19"
        checks.append(fraction([ratio <= 1.01 for ratio in ratios], at_least=share, name=name, seeds=seeds))
    return all_of(*checks)


@claim(
    says="In FuseNorm, the skip X and the branch F are uncorrelated: their sum has the variance Var(X) + Var(F)",
    paper="Eq 20",
    quantity="variance of the sum, divided by the sum of the variances",
)
def fuse_theorem__uncorrelated(trials: Trials) -> Finding:
    """The mean ratio of the two sides over the deepest model's blocks is within 5 % of 1."""
    value = _side("fusenorm_eq_20", "ratio")
    checks = []
    for arm in (SCALED, PLAIN):
        deepest = list(along(trials, "num_layers"))[-1][1]
        ratios = numbers(deepest, arm, "bounds", value, at="init")
        checks += [above(ratios, 0.95, name="ratio"), below(ratios, 1.05, name="ratio")]
    return all_of(*checks)
