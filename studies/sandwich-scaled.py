"""The depth-scaled sandwich."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fraction, lower


@claim(
    says="A sandwich (norms before and after each sub-layer) whose output gains start at 1/sqrt(N) has no loss "
    "spike. Its loss is lower than with output gains that start at 1",
    paper='"zero loss spikes" in 17T tokens (400B)',
)
def sandwich_scaled(trials: Trials) -> Finding:
    return all_of(sandwich_scaled__spikes(trials), lower(trials.tuned(), "scaled", than="sandwich_ln"))


@claim(
    says="A sandwich whose output gains start at 1/sqrt(N) has no loss spike in any seed, at any learning rate at "
    "which it trains",
    paper="No loss spike",
)
def sandwich_scaled__spikes(trials: Trials) -> Finding:
    runs = trials.arm("scaled").table
    calm = (runs["loss_spikes"] == 0)[runs["status"].isin(["finished", "short", "diverged"])]
    return fraction(calm, at_least=1.0, name="runs without a spike:", seeds=len(trials.seeds))


@claim(says="A sandwich whose output gains start at 1/sqrt(N) has a lower loss than Pre-LN")
def sandwich_scaled__pre_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "scaled", than="pre_ln")


@claim(
    says="A sandwich whose output gains start at 1/sqrt(N) has a lower loss than Peri-LN. In Peri-LN, the gains "
    "start at 1, and the embedding has a norm",
)
def sandwich_scaled__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "scaled", than="peri_ln")
