"""Peri-LN Figure 10c, Tables 8 and 9."""

from lamina.jobs.status import Status
from lamina.lab.papers.judging import Finding, Trials, all_of, below, claim, compare_values, lower

VARIANCES = ("10/d", "he", "lecun", "1/(10d)", "normal")
MOST = 0.13  # nats
WORST = 10.0  # nats, more than any loss of a byte


def reach(trials: Trials, placement: str) -> dict[int, float]:
    """By seed, the highest loss over the initializers less the lowest.

    A run that got stuck counts with the loss at which it did; one that diverged has none, and makes the reach WORST.
    """
    chosen = trials.tuned().arm(placement).where(init=list(VARIANCES))
    found = {}
    for seed, runs in chosen.table.groupby("seed"):
        if set(runs["init"]) != set(VARIANCES):
            continue
        lost = (runs["status"] == Status.DIVERGED.value).any()
        found[int(seed)] = WORST if lost else float(runs["eval_loss"].max() - runs["eval_loss"].min())
    return found


@claim(
    says="If the initial variance of the weights goes from 1/(10 d) to 10/d, Peri-LN's loss changes less than "
    "Pre-LN's loss",
    paper="Table 9: losses from 2.90 to 3.03 (Peri-LN) and from 2.97 to 4.53 (Pre-LN)",
)
def peri_init(trials: Trials) -> Finding:
    peri, pre = (reach(trials, placement) for placement in ("peri_ln", "pre_ln"))
    return compare_values(peri, pre, by=0.01, names=("range of the loss over initializers: Peri-LN", "Pre-LN"))


@claim(
    says="If the initial variance of the weights goes from 1/(10 d) to 10/d, Peri-LN's loss changes by at most 0.13 "
    "nats",
    paper="Table 9: a loss of 3.027 with 10/d, and of 2.902 with 1/(10 d)",
)
def peri_init__reach(trials: Trials) -> Finding:
    return below(reach(trials, "peri_ln"), MOST, name="range of Peri-LN's loss over initializers")


@claim(
    says="Xavier's initializer gives a lower loss than N(0, 0.02^2), with Pre-LN and with Peri-LN",
    paper="Table 8: the loss falls from 3.03 to 2.95 (Pre-LN) and from 2.93 to 2.91 (Peri-LN)",
)
def peri_init__xavier(trials: Trials) -> Finding:
    parts = (trials.tuned().where(placement=placement) for placement in ("pre_ln", "peri_ln"))
    return all_of(*(lower(part, {"init": "xavier"}, than={"init": "normal"}) for part in parts))
