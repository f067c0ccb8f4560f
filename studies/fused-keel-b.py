"""Gate B of the race, as docs/preregistration/fused-keel.md has it."""

from lamina.papers.judging import Finding, Trials, claim, lower


@claim(says="FuseNorm's skip in Keel (alpha = sqrt(N)) has a lower loss than FuseNorm after 20 tokens per parameter")
def fused_keel_b(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fused keel, root of N", than="fusenorm")
