"""Mix-LN Figure 4."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower, needs_scale


@claim(
    says="At 7B parameters, Mix-LN has a lower loss than Pre-LN (6.25 % of Mix-LN's layers are Post-LN)",
    paper="Figure 4 shows the evaluation perplexity over 13,000 steps without numbers",
)
def mix_7b(trials: Trials) -> Finding:
    found = lower(trials.tuned(), {"scheme": "mix_ln"}, than={"scheme": "pre_ln"})
    if trials.scale == "paper":
        return found
    return needs_scale("paper", f"these models are far below 7B; in them, {found.ours}")
