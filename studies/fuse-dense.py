"""FuseNorm Table 1, the dense models. ``score`` is the mean accuracy over the tasks in percent."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, higher, lower
from lamina.lab.papers.judging.curves import at_stage, split


@claim(
    says="FuseNorm has a lower loss than Pre-LN at every dense size",
    paper="WikiText perplexity: FuseNorm 20.6, Pre-LN 22.5 (740M). FuseNorm 15.7, Pre-LN 17.4 (1.3B). FuseNorm "
    "11.8, Pre-LN 12.5 (5B)",
)
def fuse_dense(trials: Trials) -> Finding:
    sizes = split(at_stage(trials.tuned(), "pretrain"), "size")
    return all_of(*(lower(size, "fusenorm", than="pre_ln") for size in sizes))


@claim(
    says="FuseNorm has a higher mean accuracy over six tasks than Pre-LN",
    paper="Mean accuracy, Pre-LN and FuseNorm: 49.8 and 50.8 (740M), 55.8 and 58.0 (1.3B), 64.1 and 66.6 (5B). "
    "FuseNorm is not better on every task",
)
def fuse_dense__tasks(trials: Trials) -> Finding:
    sizes = split(at_stage(trials.tuned(), "tasks"), "size")
    return all_of(*(higher(size, "fusenorm", than="pre_ln", column="score", by=1.0) for size in sizes))
