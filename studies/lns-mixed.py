"""LayerNorm Scaling: better in its paper, much worse in FuseNorm's."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, equivalent, lower

ARMS = ("layernorm_scaling", "pre_ln")


@claim(
    says="LayerNorm Scaling has a lower loss than Pre-LN with the plain initializer, and a higher loss with the "
    "scaled initializer. So the initializers explain why the papers disagree",
    paper="C4 perplexity: LayerNorm Scaling 20.35, Pre-LN 21.92 (250M, plain). WikiText perplexity: LayerNorm "
    "Scaling 13.6, Pre-LN 12.5 (5B, scaled)",
)
def lns_mixed(trials: Trials) -> Finding:
    return all_of(lns_mixed__plain(trials), lns_mixed__scaled(trials))


@claim(
    says="With the plain initializer, LayerNorm Scaling has a lower loss than Pre-LN",
    paper="C4 perplexity (250M): LayerNorm Scaling 20.35, Pre-LN 21.92",
)
def lns_mixed__plain(trials: Trials) -> Finding:
    return lower(trials.tuned().where(init="normal"), ARMS[0], than=ARMS[1])


@claim(
    says="With the scaled initializer, LayerNorm Scaling has a higher loss than Pre-LN",
    paper="WikiText perplexity (5B): LayerNorm Scaling 13.6, Pre-LN 12.5",
)
def lns_mixed__scaled(trials: Trials) -> Finding:
    return lower(trials.tuned().where(init="scaled"), ARMS[1], than=ARMS[0])


@claim(
    says="With the plain initializer, the losses of LayerNorm Scaling and Pre-LN differ by at most 0.02 nats",
    paper="LayerNorm Scaling did not help (nanochat's log)",
)
def lns_mixed__level(trials: Trials) -> Finding:
    return equivalent(trials.tuned().where(init="normal"), *ARMS, within=0.02)
