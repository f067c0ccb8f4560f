"""FuseNorm Table 1, the mixture of experts."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm's loss is below Pre-LN's in a mixture of experts",
    paper="WikiText perplexity 12.0 to 11.4, mean accuracy 65.1 to 66.3 (16B-A2.4B)",
)
def fuse_moe(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")
