"""Peri-LN Figure 35."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values, values_of
from lamina.lab.papers.judging.rates import best_rate


def best(trials: Trials, placement: str, optimizer: str) -> dict[int, float]:
    """By seed the loss at the best of an optimizer's rates, of runs that learned."""
    labels = [str(label) for label in trials.values("optimizer")]
    sweep = trials.where(placement=placement, optimizer=[label for label in labels if label.startswith(optimizer)])
    return values_of(sweep.where(learning_rate=best_rate(sweep)), placement)


@claim(
    says="With SGD, Peri-LN has a lower loss than Pre-LN if both placements train at their best learning rates",
    paper="Figure 35 (400M; 1e-3, 3e-3, 5e-3): Peri-LN has a lower loss than Pre-LN at every learning rate",
)
def peri_sgd(trials: Trials) -> Finding:
    arms = [best(trials, placement, "sgd") for placement in ("peri_ln", "pre_ln")]
    return compare_values(*arms, by=0.01, names=("SGD: Peri-LN", "Pre-LN"))


@claim(
    says="SGD gives a higher loss than AdamW, with Pre-LN and with Peri-LN",
    paper="Figure 35: the loss is considerably higher",
)
def peri_sgd__worse(trials: Trials) -> Finding:
    found = []
    for placement in ("pre_ln", "peri_ln"):
        arms = [best(trials, placement, optimizer) for optimizer in ("adamw", "sgd")]
        found.append(compare_values(*arms, by=0.01, names=(f"{placement}: AdamW", "SGD")))
    return all_of(*found)
