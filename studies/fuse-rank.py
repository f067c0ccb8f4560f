"""FuseNorm Figure 11: hard rank, soft rank and effective dimension ratio of the feed-forward's activations."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import numbers, rows

SMALLEST = {"hard_rank": 0.01, "soft_rank": 0.01, "edr": 1.0}  # two are shares of the width, one counts dimensions


def _rank(metric: str):
    def value(table: Frame) -> float:
        return float(rows(table, metric=metric, layer=-1, role="post")["value"].mean())

    return value


def _above(trials: Trials, metric: str, other: str, arm: str = "fusenorm") -> Finding:
    ours, theirs = (numbers(trials, each, "spectra", _rank(metric)) for each in (arm, other))
    return compare_values(
        ours, theirs, lower=False, by=SMALLEST[metric], names=(f"{metric.replace('_', ' ')}: {arm}", other)
    )


@claim(
    says="The feed-forward activations use more directions in FuseNorm than in Pre-LN, by hard rank and by effective "
    "dimension ratio (EDR)",
    paper="Hard rank: FuseNorm 0.23, Pre-LN 0.09. EDR: FuseNorm 30.7, Pre-LN 13.0",
)
def fuse_rank(trials: Trials) -> Finding:
    return all_of(*(_above(trials.tuned(), metric, "pre_ln") for metric in ("hard_rank", "edr")))


@claim(
    says="By hard rank, the feed-forward activations use more directions in FuseNorm than in HybridNorm, and more in "
    "HybridNorm than in Pre-LN",
    paper="FuseNorm 0.23, HybridNorm 0.19, Pre-LN 0.09",
)
def fuse_rank__hybrid(trials: Trials) -> Finding:
    tuned = trials.tuned()
    return all_of(_above(tuned, "hard_rank", "hybridnorm"), _above(tuned, "hard_rank", "pre_ln", arm="hybridnorm"))


@claim(
    says="By soft rank, the feed-forward activations use more directions in FuseNorm than in Pre-LN",
    paper="FuseNorm: 0.53, which equals the highest value",
)
def fuse_rank__soft(trials: Trials) -> Finding:
    return _above(trials.tuned(), "soft_rank", "pre_ln")
