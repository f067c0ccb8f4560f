"""FuseNorm Table 3 and Figure 9."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, ordered
from lamina.lab.papers.judging.curves import at_rate_of


@claim(
    says="With 128 blocks, FuseNorm has a lower loss than Mix-LN, and Mix-LN has a lower loss than Pre-LN. Post-LN "
    "and HybridNorm do not train at Pre-LN's learning rate",
    paper="WikiText perplexity (6.5B): FuseNorm 10.4, Mix-LN 11.4, Pre-LN 11.9. Post-LN and HybridNorm failed",
)
def fuse_128(trials: Trials) -> Finding:
    return all_of(fuse_128__order(trials), fuse_128__failures(trials))


@claim(
    says="With 128 blocks, FuseNorm has a lower loss than Mix-LN, and Mix-LN has a lower loss than Pre-LN",
    paper="WikiText perplexity: FuseNorm 10.4, Mix-LN 11.4, Pre-LN 11.9",
)
def fuse_128__order(trials: Trials) -> Finding:
    return ordered(trials.tuned(), ["fusenorm", "mix_ln", "pre_ln"])


@claim(
    says="With 128 blocks, Post-LN and HybridNorm do not train at Pre-LN's learning rate",
    paper='Post-LN and HybridNorm "failed"',
)
def fuse_128__failures(trials: Trials) -> Finding:
    return all_of(*(fails_to_train(at_rate_of(trials, arm, "pre_ln"), arm) for arm in ("post_ln", "hybridnorm")))
