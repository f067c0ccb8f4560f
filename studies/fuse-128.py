"""FuseNorm Table 3 and Figure 9."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, ordered
from lamina.lab.papers.judging.curves import at_rate_of


@claim(
    says="With 128 blocks, FuseNorm's loss is below Mix-LN's, which is below Pre-LN's; Post-LN and HybridNorm do not "
    "train at Pre-LN's rate",
    paper="WikiText perplexity 10.4 < 11.4 < 11.9; Post-LN and HybridNorm failed (6.5B)",
)
def fuse_128(trials: Trials) -> Finding:
    return all_of(fuse_128__order(trials), fuse_128__failures(trials))


@claim(says="FuseNorm's loss is below Mix-LN's, which is below Pre-LN's", paper="10.4 < 11.4 < 11.9")
def fuse_128__order(trials: Trials) -> Finding:
    return ordered(trials.tuned(), ["fusenorm", "mix_ln", "pre_ln"])


@claim(says="Post-LN and HybridNorm do not train at Pre-LN's rate", paper='"failed"')
def fuse_128__failures(trials: Trials) -> Finding:
    return all_of(*(fails_to_train(at_rate_of(trials, arm, "pre_ln"), arm) for arm in ("post_ln", "hybridnorm")))
