"""Peri-LN Table 6."""

from lamina.lab.papers.judging import Finding, Trials, any_of, claim, equivalent, lower

PERI, QK = {"scheme": "peri"}, {"scheme": "qk"}


@claim(
    says="QK-norm on top of Peri-LN is level with it within 0.02, or better",
    paper="2.722 to 2.711 (1.5B, one seed)",
)
def peri_qk(trials: Trials) -> Finding:
    return any_of(lower(trials.tuned(), QK, than=PERI), equivalent(trials.tuned(), QK, PERI))
