"""FuseNorm Figures 6 and 12."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, below, claim, compare_values
from lamina.lab.papers.judging.curves import numbers, rows

PROBE = "similarity"


def curve(table: Frame) -> Frame:
    """The mean cosine of two blocks' outputs by their distance."""
    return rows(table, metric="cosine_by_distance").groupby("size")["value"].mean().sort_index()


def farthest(table: Frame) -> float:
    """The cosine between the first block's output and the last's."""
    return float(curve(table).iloc[-1])


def fall(table: Frame) -> float:
    """How far the cosine falls from neighbors to the farthest pair."""
    by_distance = curve(table)
    return float(by_distance.iloc[0] - by_distance.iloc[-1])


def straightness(table: Frame) -> float:
    """R^2 of the straight line through the cosine over the distance."""
    by_distance = curve(table)
    return float(by_distance.corr(by_distance.index.to_series()) ** 2)


@claim(
    says="In Pre-LN, the cosine similarity between two blocks stays above 0.5 at every distance. At the largest "
    "distance, the cosine similarity is lower in FuseNorm than in Pre-LN",
    paper="At the largest distance: Pre-LN above 0.5, FuseNorm about 0.25",
)
def fuse_similarity(trials: Trials) -> Finding:
    tuned = trials.tuned()
    pre, fuse = (numbers(tuned, arm, PROBE, farthest) for arm in ("pre_ln", "fusenorm"))
    least = numbers(tuned, "pre_ln", PROBE, lambda table: curve(table).min())
    return all_of(
        above(least, 0.5, name="Pre-LN's least cosine"),
        compare_values(fuse, pre, by=0.05, names=("farthest pair: fusenorm", "pre_ln")),
    )


@claim(
    says="In FuseNorm, the cosine similarity between the first and the last block is about a quarter (the test: below "
    "0.5)",
    paper="A cosine similarity of 0.25",
    quantity="cosine similarity",
)
def fuse_similarity__quarter(trials: Trials) -> Finding:
    """Below 0.5, where Pre-LN's is said to stay; the number itself is that of the paper's model."""
    return below(numbers(trials.tuned(), "fusenorm", PROBE, farthest), 0.5, name="FuseNorm's farthest pair")


@claim(
    says="As the distance between two blocks grows, their cosine similarity falls more in FuseNorm than in Pre-LN. "
    "In FuseNorm, the fall is almost a straight line",
    paper='FuseNorm has a "near-linear decay", and Pre-LN a "flat curve"',
    quantity="cosine similarity",
)
def fuse_similarity__shape(trials: Trials) -> Finding:
    """Straight: R^2 above 0.9."""
    tuned = trials.tuned()
    pre, fuse = (numbers(tuned, arm, PROBE, fall) for arm in ("pre_ln", "fusenorm"))
    straight = above(numbers(tuned, "fusenorm", PROBE, straightness), 0.9, name="R^2 of FuseNorm's line")
    return all_of(compare_values(fuse, pre, lower=False, by=0.05, names=("fall: fusenorm", "pre_ln")), straight)
