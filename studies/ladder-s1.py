"""Gaps to Pre-LN at the ladder's first step. The registration's primary comparison is at its second."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm has a lower loss than Pre-LN at 0.43M parameters and 20 tokens per parameter",
    quantity="loss in nats per token",
)
def ladder_s1(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="Keel has a lower loss than Pre-LN at 0.43M parameters and 20 tokens per parameter",
    quantity="loss in nats per token",
)
def ladder_s1__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(
    says="Peri-LN has a lower loss than Pre-LN at 0.43M parameters and 20 tokens per parameter",
    quantity="loss in nats per token",
)
def ladder_s1__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
