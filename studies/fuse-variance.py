"""FuseNorm Section 3.3: Var(x_L) is of the order L for Pre-LN and of the order 1 for FuseNorm."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, below, claim
from lamina.lab.papers.judging.curves import BySeed, along, exponents, numbers, rows


def last_variance(table: Frame) -> float:
    """The variance of the stream behind the last block."""
    states = rows(table, metric="variance", role="state", sublayer="block")
    return float(states.sort_values("layer")["value"].iloc[-1])


def growth(trials: Trials, arm: str) -> BySeed:
    """By seed the exponent e of Var(x_L) ~ L^e."""
    by_depth = {
        depth: numbers(at_depth, arm, "hidden_states", last_variance, at="init")
        for depth, at_depth in along(trials, "num_layers")
    }
    return exponents(by_depth)


@claim(
    says="Before training, the variance of the last hidden state is proportional to the depth in Pre-LN, and does not "
    "depend on the depth in FuseNorm",
    paper="Theta(L) in Pre-LN, Theta(1) in FuseNorm",
)
def fuse_variance(trials: Trials) -> Finding:
    """Exponents within 0.2 of 1 and of 0: their means' intervals lie inside."""
    pre, fuse = growth(trials, "pre_ln"), growth(trials, "fusenorm")
    return all_of(
        above(pre, 0.8, name="Pre-LN's exponent of the depth"),
        below(pre, 1.2, name="Pre-LN's exponent of the depth"),
        above(fuse, -0.2, name="FuseNorm's exponent of the depth"),
        below(fuse, 0.2, name="FuseNorm's exponent of the depth"),
    )
