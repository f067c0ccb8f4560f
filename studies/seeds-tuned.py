"""Which of FuseNorm, Keel, Mix-LN and Peri-LN is best, with one initializer, each at its own learning rate."""

from dataclasses import replace

from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, lower, values_of

SEEDS = ("fusenorm", "keel", "mix_ln", "peri_ln")


@claim(
    says="One of FuseNorm, Keel, Mix-LN and Peri-LN has a lower loss than the other three and than Pre-LN",
)
def seeds_tuned(trials: Trials) -> Finding:
    tuned = trials.tuned()
    means = {arm: sum(losses.values()) / len(losses) for arm in SEEDS if (losses := values_of(tuned, arm))}
    if not means:
        return Finding(verdict=Verdict.INCONCLUSIVE, ours="none of the four trained")
    best = min(means, key=lambda arm: means[arm])
    finding = all_of(*(lower(tuned, best, than=arm) for arm in (*SEEDS, "pre_ln") if arm != best))
    p = None if finding.p is None else min(1.0, finding.p * len(SEEDS))  # the best one was chosen by its loss
    return replace(finding, p=p)


@claim(
    says="FuseNorm has a lower loss than Pre-LN",
    paper="WikiText perplexity, FuseNorm and Pre-LN: 20.6 and 22.5, 15.7 and 17.4, 11.8 and 12.5",
)
def seeds_tuned__fusenorm(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="Keel has a lower loss than Pre-LN",
    paper="At 512 layers, the average score of Keel is 3.2 points above the score of Pre-LN",
)
def seeds_tuned__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(says="Mix-LN has a lower loss than Pre-LN", paper="C4 perplexity (250M): Mix-LN 21.39, Pre-LN 21.92")
def seeds_tuned__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(says="Peri-LN has a lower loss than Pre-LN", paper="Loss (400M): Peri-LN 2.91, Pre-LN 3.01")
def seeds_tuned__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
