"""FuseNorm Eq 10 and 11: sigma^-2L along Post-LN's residual path, sigma^-L along FuseNorm's."""

import math

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, below, claim, compare_values
from lamina.lab.papers.judging.curves import BySeed, along, numbers, rows


def path(table: Frame) -> float:
    """The natural logarithm of the residual path's norm, added up over the blocks behind the first."""
    norms = rows(table, metric="norm", role="residual_path")
    return sum(math.log(norm) for norm in norms.loc[norms["layer"] > 0, "value"])


def exponent(table: Frame, sublayers: list[str]) -> float:
    """The e of path = sigma^(-e L), L the blocks behind the first and log sigma the mean over the norms on the path."""
    sigmas = rows(table, metric="sigma", role="post_norm", sublayer=sublayers)
    sigmas = sigmas[sigmas["layer"] > 0]
    log_sigma = sum(math.log(sigma) for sigma in sigmas["value"]) / len(sigmas)
    return -path(table) / log_sigma / sigmas["layer"].nunique()


def _deepest(trials: Trials) -> Trials:
    return list(along(trials, "num_layers"))[-1][1]


def _within(values: BySeed, expected: float, tolerance: float, name: str) -> Finding:
    return all_of(above(values, expected - tolerance, name=name), below(values, expected + tolerance, name=name))


@claim(
    says="Along L blocks without branches, after the first block, the gradient shrinks by a factor of sigma^(2L) in "
    "Post-LN and by a factor of sigma^L in FuseNorm. Here sigma is the standard deviation of a norm's input",
    paper="Eq 10: exponents 2 and 1",
)
def fuse_decay(trials: Trials) -> Finding:
    """The measured Jacobian of the path against the measured sigma of the norms on it: exponents within 0.1."""
    both, one = ["attention", "feed_forward"], ["feed_forward"]
    checks = []
    for _, at_depth in along(trials, "num_layers"):
        post = numbers(at_depth, "post_ln", "jacobian", lambda table: exponent(table, both), at="init")
        fuse = numbers(at_depth, "fusenorm", "jacobian", lambda table: exponent(table, one), at="init")
        checks += [_within(post, 2.0, 0.1, "Post-LN's exponent"), _within(fuse, 1.0, 0.1, "FuseNorm's exponent")]
    return all_of(*checks)


@claim(
    says="Without branches, the gradient shrinks as much along L blocks of Post-LN as along 2 L blocks of FuseNorm",
    paper="Eq 11: with sigma 1.1 and 50 layers, a factor of 1.1^50 = 117",
)
def fuse_decay__twice(trials: Trials) -> Finding:
    """Per block, Post-LN's logarithm is 1.5 to 2.5 times FuseNorm's: their sigmas are measured, not equal."""
    deepest = _deepest(trials)
    post, fuse = (numbers(deepest, arm, "jacobian", path, at="init") for arm in ("post_ln", "fusenorm"))
    ratios = {seed: post[seed] / fuse[seed] for seed in post if seed in fuse}
    return _within(ratios, 2.0, 0.5, "log of Post-LN's path, divided by the log of FuseNorm's path")


@claim(
    says="From the last block to the first, the gradient of the hidden states shrinks more in Post-LN than in FuseNorm",
    paper="Section 3.3 explains this effect by Eq 10 and 11",
)
def fuse_decay__gradient(trials: Trials) -> Finding:
    """The equations follow the skips alone; this is the gradient of the loss, branches included."""

    def gain(table: Frame) -> float:
        states = rows(table, metric="gradient_norm", role="state", sublayer="block").sort_values("layer")["value"]
        return math.log10(states.iloc[1] / states.iloc[-1])

    deepest = _deepest(trials)
    post, fuse = (numbers(deepest, arm, "gradients", gain, at="init") for arm in ("post_ln", "fusenorm"))
    return compare_values(
        post,
        fuse,
        by=0.05,
        names=("log10(first state's gradient / last state's gradient): post_ln", "fusenorm"),
    )
