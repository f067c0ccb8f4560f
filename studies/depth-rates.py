"""The rate that is best at 8 blocks, and at 64 with and without depth scaling."""

import math

from lamina.lab.papers.judging import Finding, Trials, above, below, claim, optimum
from lamina.lab.papers.judging.findings import inconclusive


@claim(
    says="With CompleteP, the best learning rates at 8 and at 64 blocks differ by at most a factor of 2",
    paper="The best learning rate is the same at all depths",
)
def depth_rates(trials: Trials) -> Finding:
    return _moved(trials, "completep", above_a_factor=False)


@claim(
    says="With depth-muP, the best learning rates at 8 and at 64 blocks differ by at most a factor of 2",
    paper="Depth-muP: the best learning rate is the same at all depths if each branch has one layer. CompleteP: in "
    "Transformers, it changes",
)
def depth_rates__depth_mup(trials: Trials) -> Finding:
    return _moved(trials, "depth-mup", above_a_factor=False)


@claim(
    says="Without depth scaling, the best learning rates at 8 and at 64 blocks differ by more than a factor of 2",
    paper="The best learning rate changes with the depth",
)
def depth_rates__none(trials: Trials) -> Finding:
    return _moved(trials, "none", above_a_factor=True)


def _moved(trials: Trials, scaling: str, *, above_a_factor: bool) -> Finding:
    """How far the optimum is at 64 blocks from that at 8, in powers of 2 by seed; one at the sweep's edge is none."""
    apart = {}
    for seed in trials.seeds:
        arms = ({"scaling": "none", "num_layers": 8}, {"scaling": scaling, "num_layers": 64})
        try:
            shallow, deep = (optimum(trials.where(seed=seed), arm) for arm in arms)
        except ValueError:  # no rate trains
            continue
        if shallow.at_edge or deep.at_edge:
            return inconclusive(
                f"{scaling}: a best rate is at the sweep's edge", f"seed {seed}", seeds=len(trials.seeds)
            )
        apart[seed] = abs(math.log2(deep.rate / shallow.rate))
    judge = above if above_a_factor else below
    return judge(apart, 1.0, name=f"{scaling}: log2 of one best rate over the other, by seed")
