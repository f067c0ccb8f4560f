"""The depth-scaled sandwich."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fraction, lower


@claim(
    says="With output gains that start at 1/sqrt(N), a sandwich has no loss spike and a lower loss than without",
    paper='"zero loss spikes" in 17T tokens (400B)',
)
def sandwich_scaled(trials: Trials) -> Finding:
    return all_of(sandwich_scaled__spikes(trials), lower(trials.tuned(), "scaled", than="sandwich_ln"))


@claim(says="It has no loss spike, in any seed and at any rate of the sweep at which it trains", paper="none")
def sandwich_scaled__spikes(trials: Trials) -> Finding:
    runs = trials.arm("scaled").table
    calm = (runs["loss_spikes"] == 0)[runs["status"].isin(["finished", "short", "diverged"])]
    return fraction(calm, at_least=1.0, name="runs without a spike:", seeds=len(trials.seeds))


@claim(says="Its loss is below Pre-LN's")
def sandwich_scaled__pre_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "scaled", than="pre_ln")


@claim(says="Its loss is below Peri-LN's, whose embedding has a norm and whose gains start at 1")
def sandwich_scaled__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "scaled", than="peri_ln")
