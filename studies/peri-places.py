"""Peri-LN Table 5."""

from lamina.lab.papers.judging import Finding, Trials, claim, fails_to_train, ordered
from lamina.lab.papers.judging.curves import at_rate_of


@claim(
    says="Norms at A and B (Peri-LN) give a lower loss than norms at A and C. Norms at A and C give a lower loss than "
    "a norm at C (Post-LN)",
    paper="Losses (400M): 2.91 (A and B), 3.01 (A and C), 3.05 (C)",
)
def peri_places(trials: Trials) -> Finding:
    return ordered(trials.tuned(), ["peri_ln", "pre_post_ln", "post_ln"])


@claim(
    says="With norms at B alone, the model does not train at the learning rate that suits Peri-LN",
    paper="The run diverged (400M)",
)
def peri_places__b_alone(trials: Trials) -> Finding:
    return fails_to_train(at_rate_of(trials, "out_ln", "peri_ln"), "out_ln")
