"""FuseNorm Table 1, the mixture of experts."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="In a mixture of experts, FuseNorm has a lower loss than Pre-LN",
    paper="Pre-LN and FuseNorm (16B parameters, 2.4B active): WikiText perplexity 12.0 and 11.4, mean accuracy 65.1 "
    "and 66.3",
)
def fuse_moe(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")
