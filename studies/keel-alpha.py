"""Keel's constant on the skip."""

from lamina.lab.papers.judging import Finding, Trials, all_of, any_of, claim, lower, no_worse

OTHERS = ("L/8", "L/2", "4 L")


@claim(
    says="In a deep model, the loss with alpha = L is at most 0.01 nats above the losses with alpha = L/8, L/2 and 4 L",
    paper="The paper derives alpha = L from the Jacobian of the residual path",
)
def keel_alpha(trials: Trials) -> Finding:
    return all_of(*(no_worse(trials.tuned(), "deep, L", than=f"deep, {alpha}") for alpha in OTHERS))


@claim(says="In a deep model, alpha = L/8 gives a higher loss than alpha = L")
def keel_alpha__small(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep, L", than="deep, L/8")


@claim(
    says="In a shallow model, one of alpha = L/8, L/2 and 4 L gives a loss that is at most 0.01 nats above the loss "
    "with alpha = L",
    paper='"smaller models may take another value"',
)
def keel_alpha__shallow(trials: Trials) -> Finding:
    return any_of(*(no_worse(trials.tuned(), f"shallow, {alpha}", than="shallow, L") for alpha in OTHERS))
