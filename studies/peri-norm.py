"""Peri-LN Figure 19."""

from lamina.lab.papers.judging import Finding, Trials, claim, equivalent


@claim(
    says="Peri-LN's loss changes by less than 0.02 nats if LayerNorm replaces RMSNorm",
    paper="Figure 19 (400M): no notable difference",
)
def peri_norm(trials: Trials) -> Finding:
    return equivalent(trials.tuned(), {"scheme": "layer"}, {"scheme": "rms"})
