"""Which of FuseNorm, Keel, Mix-LN and Peri-LN is best, with one initializer, each at its own learning rate."""

from dataclasses import replace

from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, lower, values_of

SEEDS = ("fusenorm", "keel", "mix_ln", "peri_ln")


@claim(says="One of FuseNorm, Keel, Mix-LN and Peri-LN has a lower loss than each of the others and Pre-LN")
def seeds_tuned(trials: Trials) -> Finding:
    tuned = trials.tuned()
    means = {arm: sum(losses.values()) / len(losses) for arm in SEEDS if (losses := values_of(tuned, arm))}
    if not means:
        return Finding(verdict=Verdict.INCONCLUSIVE, ours="none of the four trained")
    best = min(means, key=lambda arm: means[arm])
    finding = all_of(*(lower(tuned, best, than=arm) for arm in (*SEEDS, "pre_ln") if arm != best))
    p = None if finding.p is None else min(1.0, finding.p * len(SEEDS))  # the best one was chosen by its loss
    return replace(finding, p=p)


@claim(says="FuseNorm's loss is below Pre-LN's", paper="WikiText perplexity 20.6 < 22.5, 15.7 < 17.4, 11.8 < 12.5")
def seeds_tuned__fusenorm(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(says="Keel's loss is below Pre-LN's", paper="+3.2 points on average over tasks at 512 layers")
def seeds_tuned__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(says="Mix-LN's loss is below Pre-LN's", paper="C4 perplexity 21.39 < 21.92 (250M)")
def seeds_tuned__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(says="Peri-LN's loss is below Pre-LN's", paper="2.91 < 3.01 (400M)")
def seeds_tuned__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
