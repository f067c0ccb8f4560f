"""Keel's constant on the skip."""

from lamina.lab.papers.judging import Finding, Trials, all_of, any_of, claim, lower, no_worse

OTHERS = ("L/8", "L/2", "4 L")


@claim(
    says="In a deep model, alpha = L is at most 0.01 worse than L/8, L/2 and 4 L",
    paper="alpha = L, from the residual path's Jacobian",
)
def keel_alpha(trials: Trials) -> Finding:
    return all_of(*(no_worse(trials.tuned(), "deep, L", than=f"deep, {alpha}") for alpha in OTHERS))


@claim(says="In a deep model, alpha = L/8 is worse than L")
def keel_alpha__small(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep, L", than="deep, L/8")


@claim(
    says="A shallow model may take another alpha: one of L/8, L/2 and 4 L is at most 0.01 worse than L",
    paper='"smaller models may take another value"',
)
def keel_alpha__shallow(trials: Trials) -> Finding:
    return any_of(*(no_worse(trials.tuned(), f"shallow, {alpha}", than="shallow, L") for alpha in OTHERS))
