"""FuseNorm Figure 7: the gradient norms of the feed-forward's weights."""

import math

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, below, claim, compare_values, fails_to_train, trains
from lamina.lab.papers.judging.curves import deep, layer_means, log10_mean, rows, shallow


def norms(table: Frame) -> Frame:
    """The feed-forward's gradient norm by layer, the mean over the second half of the recorded steps."""
    table = rows(table, metric="gradient_norm", sublayer="feed_forward", role="all")
    return layer_means(table[table["step"] > table["step"].max() / 2])


def tilt(table: Frame) -> float:
    """log10 of the deepest third's gradient norm over the first third's."""
    by_layer = norms(table)
    return log10_mean(deep(by_layer)) - log10_mean(shallow(by_layer))


def behind_last(table: Frame) -> float:
    """log10 of the median layer's gradient norm over the last layer's."""
    by_layer = norms(table)
    return log10_mean(by_layer.iloc[:-1].quantile([0.5])) - log10_mean(by_layer.iloc[[-1]])


def _values(trials: Trials, arm: str, rate: float, value) -> dict[int, float]:
    table = trials.where(learning_rate=rate).arm(arm).record("layers")
    by_seed = {int(str(seed)): value(part) for seed, part in table.groupby("seed")}
    return {seed: number for seed, number in by_seed.items() if math.isfinite(number)}


def _rates(trials: Trials) -> list[float]:
    return sorted(float(str(rate)) for rate in trials.values("learning_rate"))


@claim(
    says="At every learning rate, the feed-forward gradients differ less between layers in FuseNorm than in Post-LN. "
    "At the lowest learning rate, the gradients shrink more toward the first layers in Post-LN than in FuseNorm",
    paper="Figure 7 shows curves without numbers",
)
def fuse_gradients(trials: Trials) -> Finding:
    low, *_ = rates = _rates(trials)
    faded = compare_values(
        _values(trials, "post_ln", low, tilt),
        _values(trials, "fusenorm", low, tilt),
        lower=False,
        by=0.05,
        names=(
            f"log10(deep layers' gradient / first layers' gradient) at learning rate {low:g}, post_ln",
            "fusenorm",
        ),
    )
    even = [
        compare_values(
            _values(trials, "fusenorm", rate, lambda table: abs(tilt(table))),
            _values(trials, "post_ln", rate, lambda table: abs(tilt(table))),
            by=0.05,
            names=(
                f"|log10(deep layers' gradient / first layers' gradient)| at learning rate {rate:g}, fusenorm",
                "post_ln",
            ),
        )
        for rate in rates
    ]
    return all_of(faded, *even)


@claim(
    says="At the highest learning rate, FuseNorm trains, but Post-LN does not. In Post-LN, the gradients are almost "
    "zero in all layers but the last",
    paper="Figure 7 (left and middle) shows curves without numbers",
)
def fuse_gradients__collapse(trials: Trials) -> Finding:
    """Near zero: the median layer's gradient is below a hundredth of the last layer's."""
    high = _rates(trials)[-1]
    at_high = trials.where(learning_rate=high)
    return all_of(
        fails_to_train(at_high, "post_ln"),
        trains(at_high, "fusenorm"),
        below(
            _values(trials, "post_ln", high, behind_last),
            -2.0,
            name="log10(median layer's gradient / last layer's gradient), Post-LN",
        ),
    )
