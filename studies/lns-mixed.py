"""LayerNorm Scaling: better in its paper, much worse in FuseNorm's."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, equivalent, lower

ARMS = ("layernorm_scaling", "pre_ln")


@claim(
    says="LayerNorm Scaling's loss is below Pre-LN's with the plain initializer and above it with the scaled one: the "
    "initializer is why the papers disagree",
    paper="C4 perplexity 20.35 < 21.92 (250M, plain); WikiText 13.6 > 12.5 (5B, scaled)",
)
def lns_mixed(trials: Trials) -> Finding:
    return all_of(lns_mixed__plain(trials), lns_mixed__scaled(trials))


@claim(says="With the plain initializer, LayerNorm Scaling's loss is below Pre-LN's", paper="20.35 < 21.92 (250M)")
def lns_mixed__plain(trials: Trials) -> Finding:
    return lower(trials.tuned().where(init="normal"), ARMS[0], than=ARMS[1])


@claim(says="With the scaled initializer, LayerNorm Scaling's loss is above Pre-LN's", paper="13.6 > 12.5 (5B)")
def lns_mixed__scaled(trials: Trials) -> Finding:
    return lower(trials.tuned().where(init="scaled"), ARMS[1], than=ARMS[0])


@claim(says="With the plain initializer, the two losses are level within 0.02", paper="no help (nanochat's log)")
def lns_mixed__level(trials: Trials) -> Finding:
    return equivalent(trials.tuned().where(init="normal"), *ARMS, within=0.02)
