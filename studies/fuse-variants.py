"""FuseNorm Table 2 and Figure 5."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, equivalent, fails_to_train, lower
from lamina.lab.papers.judging.curves import at_rate_of

OTHERS = ("hybridnorm", "peri_ln", "mix_ln", "pre_ln", "layernorm_scaling", "olmo2")


@claim(
    says="The losses rise in this order: FuseNorm, HybridNorm, Peri-LN and Mix-LN (equal), Pre-LN, LayerNorm Scaling "
    "and OLMo 2",
    paper="WikiText perplexity (5B, 64 layers): FuseNorm 11.8, HybridNorm 12.2, Peri-LN 12.3, Mix-LN 12.3, "
    "Pre-LN 12.5, LayerNorm Scaling 13.6, OLMo 2 14.0",
)
def fuse_variants(trials: Trials) -> Finding:
    tuned = trials.tuned()
    order = [
        ("fusenorm", "hybridnorm"),
        ("hybridnorm", "peri_ln"),
        ("hybridnorm", "mix_ln"),
        ("peri_ln", "pre_ln"),
        ("mix_ln", "pre_ln"),
        ("pre_ln", "layernorm_scaling"),
        ("pre_ln", "olmo2"),
    ]
    return all_of(*(lower(tuned, a, than=b) for a, b in order), equivalent(tuned, "peri_ln", "mix_ln", within=0.02))


@claim(
    says="FuseNorm has a lower loss than every other placement",
    paper="WikiText perplexity 11.8 (FuseNorm), and 12.2 or more (the others)",
)
def fuse_variants__best(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), "fusenorm", than=other) for other in OTHERS))


@claim(
    says="With the scaled initializer, LayerNorm Scaling and OLMo 2's placement have a higher loss than Pre-LN",
    paper="WikiText perplexity: LayerNorm Scaling 13.6, OLMo 2 14.0, Pre-LN 12.5",
)
def fuse_variants__worse(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), "pre_ln", than=other) for other in ("layernorm_scaling", "olmo2")))


@claim(
    says="HybridNorm, Peri-LN and Mix-LN have a lower loss than Pre-LN",
    paper="WikiText perplexity: HybridNorm 12.2, Peri-LN 12.3, Mix-LN 12.3, Pre-LN 12.5",
)
def fuse_variants__better(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), other, than="pre_ln") for other in ("hybridnorm", "peri_ln", "mix_ln")))


@claim(says="At Pre-LN's learning rate, Post-LN does not train", paper='Post-LN "failed"')
def fuse_variants__post_fails(trials: Trials) -> Finding:
    return fails_to_train(at_rate_of(trials, "post_ln", "pre_ln"), "post_ln")
