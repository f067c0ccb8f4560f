"""FuseNorm Section 4.1: the topology, not the initializer, is what lets FuseNorm train."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, trains
from lamina.lab.papers.judging.curves import at_rate_of


@claim(
    says="With the scaled initializer for both, FuseNorm trains at its rate and Post-LN does not",
    paper="Post-LN failed at 5B (64 layers) and 6.5B (128), with the initializer and the rate of the others",
)
def fuse_topology(trials: Trials) -> Finding:
    post = fails_to_train(at_rate_of(trials, "post_ln", "fusenorm"), "post_ln")
    return all_of(trains(trials.tuned(), "fusenorm"), post)


@claim(says="Post-LN does not train at any of the rates", paper="only one rate was tried")
def fuse_topology__any_rate(trials: Trials) -> Finding:
    return fails_to_train(trials.tuned(), "post_ln")
