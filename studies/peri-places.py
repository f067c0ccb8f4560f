"""Peri-LN Table 5."""

from lamina.lab.papers.judging import Finding, Trials, claim, fails_to_train, ordered
from lamina.lab.papers.judging.curves import at_rate_of


@claim(
    says="Peri-LN's loss (A + B) is below that of norms at A + C, and that is below Post-LN's (C)",
    paper="2.91 < 3.01 < 3.05 (400M)",
)
def peri_places(trials: Trials) -> Finding:
    return ordered(trials.tuned(), ["peri_ln", "pre_post_ln", "post_ln"])


@claim(says="With norms at B alone, at the rate that suits Peri-LN, the model does not train", paper="diverged (400M)")
def peri_places__b_alone(trials: Trials) -> Finding:
    return fails_to_train(at_rate_of(trials, "out_ln", "peri_ln"), "out_ln")
