"""FuseNorm Figure 7 and Section 6: the stable range of learning rates."""

import math

from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, fraction
from lamina.lab.papers.judging.curves import BySeed, trained


def highest(trials: Trials, arm: str) -> BySeed:
    """By seed log2 of the highest learning rate at which the arm trained to the end; minus infinity for none."""
    table = trained(trials.arm(arm)).table
    return {
        seed: math.log2(table.loc[table["seed"] == seed, "learning_rate"].max())
        if (table["seed"] == seed).any()
        else -math.inf
        for seed in trials.arm(arm).seeds
    }


def count(trials: Trials, arm: str) -> BySeed:
    """By seed at how many rates the arm trained to the end."""
    table = trained(trials.arm(arm)).table
    return {seed: float((table["seed"] == seed).sum()) for seed in trials.arm(arm).seeds}


@claim(
    says="FuseNorm trains at more learning rates than Post-LN, and at higher learning rates",
    paper="740M: FuseNorm trains stably at all three learning rates, and Post-LN collapses above 8e-5",
)
def fuse_lr_range(trials: Trials) -> Finding:
    """For every seed at least: the rates are a grid, so the seeds' counts may all be equal and no test applies."""
    pairs = [(measure(trials, "fusenorm"), measure(trials, "post_ln")) for measure in (count, highest)]
    names = (
        "seeds for which FuseNorm trains at more learning rates",
        "seeds for which FuseNorm trains at a higher learning rate",
    )
    seeds = len(trials.seeds)
    ours = "; ".join(
        f"{arm} trains at {list(count(trials, arm).values())} rates by seed" for arm in ("fusenorm", "post_ln")
    )
    checks = [
        fraction([fuse[seed] > post[seed] for seed in fuse], at_least=1.0, name=name, seeds=seeds)
        for (fuse, post), name in zip(pairs, names, strict=True)
    ]
    if seeds < 3:
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=ours, seeds=seeds, note="fewer than 3 seeds")
    return all_of(*checks).noted(ours)
