"""Mix-LN Figures 2, 3 and 6b: what the model loses without each of its layers."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import deep, layer_means, numbers, rows, shallow
from lamina.lab.papers.judging.findings import in_words

PROBE = "layer_drop"
LEAST = 0.1  # of the compared harm: 0.01 was up to a third of it; changed after the trials


def harm(table: Frame) -> Frame:
    """Nats per token lost without each layer."""
    return layer_means(rows(table, metric="loss_increase", meaning="remove"))


def _halves(trials: Trials, arm: str, *, deep_is_lower: bool) -> Finding:
    """Compare both ends of the model. A note says if the verdict depends on the outermost layer of the end that should
    matter more.
    """
    ends = {
        "": (deep, shallow),
        "layer 0": (deep, lambda means: shallow(means).iloc[1:]),
        "the last layer": (lambda means: deep(means).iloc[:-1], shallow),
    }

    def compared(without: str) -> Finding:
        late, early = (
            numbers(trials, arm, PROBE, lambda table, part=part: part(harm(table)).mean()) for part in ends[without]
        )
        names = (f"{arm}'s deepest third", "its first third")
        return compare_values(late, early, lower=deep_is_lower, share=LEAST, names=names)

    found, without = compared(""), "layer 0" if deep_is_lower else "the last layer"
    rest = compared(without)
    if found.verdict.decided and rest.verdict != found.verdict:
        return found.noted(f'without {without}, the verdict is "{in_words(rest.verdict.value)}": {rest.ours}')
    return found


@claim(
    says="In Pre-LN, removing a deep layer raises the loss less than removing an early layer. In Post-LN, removing "
    "an early layer raises the loss less than removing a deep layer",
    paper="Figures 3c and 3d (130M, ARC-e): layers 0 to 7 of Post-LN hardly matter, and most layers of Pre-LN "
    "after the first layer hardly matter",
    quantity="rise of the loss in nats",
)
def mix_drop(trials: Trials) -> Finding:
    tuned = trials.tuned()
    return all_of(_halves(tuned, "pre_ln", deep_is_lower=True), _halves(tuned, "post_ln", deep_is_lower=False))


@claim(
    says="In Pre-LN, removing a deep layer raises the loss less than removing an early layer",
    paper="Figures 2d and 3d",
    quantity="rise of the loss in nats",
)
def mix_drop__pre(trials: Trials) -> Finding:
    return _halves(trials.tuned(), "pre_ln", deep_is_lower=True)


@claim(
    says="In Post-LN, removing an early layer raises the loss less than removing a deep layer",
    paper="Figures 2c and 3c",
    quantity="rise of the loss in nats",
)
def mix_drop__post(trials: Trials) -> Finding:
    return _halves(trials.tuned(), "post_ln", deep_is_lower=False)


@claim(
    says="Removing a deep layer raises the loss more in Mix-LN than in Pre-LN",
    paper="Figure 6b, 130M",
    quantity="rise of the loss in nats",
)
def mix_drop__mix(trials: Trials) -> Finding:
    tuned = trials.tuned()
    mix, pre = (numbers(tuned, arm, PROBE, lambda table: deep(harm(table)).mean()) for arm in ("mix_ln", "pre_ln"))
    return compare_values(mix, pre, lower=False, share=LEAST, names=("mix_ln's deepest third", "pre_ln's"))
