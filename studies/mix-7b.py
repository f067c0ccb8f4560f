"""Mix-LN Figure 4."""

from lamina.studies.judging import Finding, Trials, claim, lower


@claim(
    says="At 7B, Mix-LN with 6.25 % of its layers as Post-LN stays below Pre-LN",
    paper="Figure 4: the evaluation perplexity over 13,000 steps, no number printed",
)
def mix_7b(trials: Trials) -> Finding:
    return lower(trials, {"scheme": "mix_ln"}, than={"scheme": "pre_ln"})
