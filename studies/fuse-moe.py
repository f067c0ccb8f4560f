"""FuseNorm Table 1, the mixture of experts."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="In a mixture of experts, FuseNorm's loss is below Pre-LN's",
    paper="From Pre-LN to FuseNorm (16B parameters, 2.4B of them active): WikiText perplexity 12.0 to 11.4, mean "
    "accuracy 65.1 to 66.3",
)
def fuse_moe(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")
