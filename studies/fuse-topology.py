"""FuseNorm Section 4.1: the topology, not the initializer, is what lets FuseNorm train."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, trains
from lamina.lab.papers.judging.curves import at_rate_of


@claim(
    says="With the scaled initializer and FuseNorm's learning rate, FuseNorm trains and Post-LN does not",
    paper="Post-LN failed at 5B (64 layers) and at 6.5B (128 layers), with the other placements' initializer and "
    "learning rate",
)
def fuse_topology(trials: Trials) -> Finding:
    post = fails_to_train(at_rate_of(trials, "post_ln", "fusenorm"), "post_ln")
    return all_of(trains(trials.tuned(), "fusenorm"), post)


@claim(
    says="With the scaled initializer, Post-LN does not train at any of the learning rates",
    paper="The paper tried only one learning rate",
)
def fuse_topology__any_rate(trials: Trials) -> Finding:
    return fails_to_train(trials.tuned(), "post_ln")
