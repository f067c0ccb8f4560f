"""Gaps to Pre-LN at the ladder's second step: the primary comparison of studies/preregistration/ladder.md."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm has a lower loss than Pre-LN at 1.08M parameters and 20 tokens per parameter",
    quantity="loss in nats per token",
)
def ladder_s2(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="Keel has a lower loss than Pre-LN at 1.08M parameters and 20 tokens per parameter",
    quantity="loss in nats per token",
)
def ladder_s2__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(
    says="Peri-LN has a lower loss than Pre-LN at 1.08M parameters and 20 tokens per parameter",
    quantity="loss in nats per token",
)
def ladder_s2__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
