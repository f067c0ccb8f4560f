"""Peri-LN Figures 32-34."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, equivalent, lower
from lamina.lab.papers.judging.curves import split

COMPARABLE = 0.05  # nats


@claim(
    says="The losses of Peri-LN and of OLMo 2's placement differ by less than 0.05 nats",
    paper="Figures 32 to 34 (400M, 1.5B, 3.2B): the losses are similar. The figures print no numbers",
)
def peri_olmo2(trials: Trials) -> Finding:
    parts = split(trials.tuned(), "size")
    return all_of(*(equivalent(part, "peri_ln", "olmo2", within=COMPARABLE) for part in parts))


@claim(
    says="Peri-LN has a slightly lower loss than OLMo 2's placement",
    paper="Figures 32 and 33: slightly lower at 400M and 1.5B, but not at 3.2B",
)
def peri_olmo2__better(trials: Trials) -> Finding:
    tuned = trials.tuned()
    if "size" in tuned.axes:
        tuned = tuned.where(size=["400m", "1.5b"])
    parts = split(tuned, "size")
    return all_of(*(lower(part, "peri_ln", than="olmo2") for part in parts))
