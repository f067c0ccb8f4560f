"""Peri-LN Table 6."""

from lamina.lab.papers.judging import Finding, Trials, any_of, claim, equivalent, lower

PERI, QK = {"scheme": "peri"}, {"scheme": "qk"}


@claim(
    says="QK-norm lowers Peri-LN's loss, or changes the loss by less than 0.02 nats",
    paper="QK-norm lowers the loss from 2.722 to 2.711 (1.5B, one seed)",
)
def peri_qk(trials: Trials) -> Finding:
    return any_of(lower(trials.tuned(), QK, than=PERI), equivalent(trials.tuned(), QK, PERI))
