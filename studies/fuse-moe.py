"""FuseNorm Table 1, the mixture of experts."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="In a mixture of experts, FuseNorm has a lower loss than Pre-LN",
    paper="16B parameters, 2.4B of them active. WikiText perplexity: FuseNorm 11.4, Pre-LN 12.0. Mean accuracy:"
    " FuseNorm 66.3, Pre-LN 65.1",
)
def fuse_moe(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")
