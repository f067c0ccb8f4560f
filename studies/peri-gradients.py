"""Peri-LN Figure 7."""

import numpy as np

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import numbers, rows, split


def spread(table: Frame) -> float:
    """The standard deviation over the layers of log10 of the gradient's norm: 0 for the same norm in each."""
    return float(np.log10(rows(table, metric="gradient_norm", sublayer="block", role="all")["value"]).std())


def slope(table: Frame) -> float:
    """The factor, in powers of ten, from the first third of the layers to the last third."""
    norms = np.log10(rows(table, metric="gradient_norm", sublayer="block", role="all").sort_values("layer")["value"])
    third = max(1, len(norms) // 3)
    return float(norms.iloc[-third:].mean() - norms.iloc[:third].mean())


def more_even(trials: Trials, other: str, at: str) -> Finding:
    """Peri-LN's gradients against another placement's, at each depth that has both."""
    found = []
    for part in split(trials, "depth"):
        if other in part.values("placement"):
            ours, theirs = (numbers(part, placement, "gradients", spread, at=at) for placement in ("peri_ln", other))
            names = (f"spread over layers at {at}: peri_ln", other)
            found.append(compare_values(ours, theirs, by=0.05, names=names))
    return all_of(*found)


@claim(
    says="After training, the gradient norms of the layers are more similar in Peri-LN than in Pre-LN and in Post-LN",
    paper="Figure 7 (1.5B): Peri-LN's gradients are similar in all layers, and Post-LN's fall toward the first layers",
    quantity="log10 of the gradient norm",
)
def peri_gradients(trials: Trials) -> Finding:
    return all_of(*(more_even(trials.tuned(), other, "end") for other in ("pre_ln", "post_ln")))


@claim(
    says="Before training, the gradient norms of the layers are more similar in Peri-LN than in Pre-LN",
    paper="Figure 7: before training, Pre-LN's gradients grow toward the first layers, and Peri-LN's are similar in "
    "all layers",
    quantity="log10 of the gradient norm",
)
def peri_gradients__init(trials: Trials) -> Finding:
    return more_even(trials.tuned(), "pre_ln", "init")


@claim(
    says="After training, Post-LN's gradients are smaller in the first third of the layers than in the last third",
    paper="Figure 7, Section 5.2: Post-LN's gradients become smaller toward the first layers, and can vanish",
    quantity="gradient norm",
)
def peri_gradients__post(trials: Trials) -> Finding:
    part = trials.tuned() if "depth" not in trials.axes else trials.where(depth="shallow")
    ours = numbers(part, "post_ln", "gradients", slope)
    return compare_values(
        ours,
        dict.fromkeys(ours, 0.0),
        lower=False,
        by=0.05,
        names=("log10(last layers' gradient / first layers' gradient)", "none"),
    )
