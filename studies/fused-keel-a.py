"""Gate A of the race, as studies/preregistration/fused-keel.md has it."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="Keel with FuseNorm's skip (alpha = sqrt(N)) has a lower loss than FuseNorm after 400 steps",
    quantity="loss in nats per byte",
)
def fused_keel_a(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fused keel, root of N", than="fusenorm")
