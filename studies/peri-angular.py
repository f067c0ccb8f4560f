"""Peri-LN Figures 9a and 39."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values, equivalent_values
from lamina.lab.papers.judging.curves import deep, layer_means, numbers, rows

FIXED = {"placement": "peri_ln(learnable_gain=false)"}
ALIKE = 0.05  # of the mean angle, where 0.5 is a right angle
LEAST = 0.1  # of the compared angle: 0.01 was up to a third of it; changed after the trials


def each_layer(table: Frame) -> Frame:
    """The angle by which each layer turns the stream, by depth."""
    return layer_means(rows(table, metric="angular_distance", size=1), "start")


def mean_angle(table: Frame) -> float:
    return float(each_layer(table).mean())


def deep_angle(table: Frame) -> float:
    """Of the last third of the layers."""
    return float(deep(each_layer(table)).mean())


@claim(
    says="After training, Pre-LN's layers change the hidden states' direction less than Peri-LN's layers. So "
    "Pre-LN's layers are more redundant",
    paper="Figure 9a (400M): Pre-LN is clearly the most redundant",
)
def peri_angular(trials: Trials) -> Finding:
    pre, peri = (numbers(trials.tuned(), p, "angular_distance", mean_angle) for p in ("pre_ln", "peri_ln"))
    return compare_values(pre, peri, share=LEAST, names=("mean angle: Pre-LN", "Peri-LN"))


@claim(
    says="Before training, the layers of Pre-LN and Peri-LN change the hidden states' direction by the same angle, "
    "within 0.05 (0.5 is a right angle). In Post-LN, the angle is smaller",
    paper="Figure 39a: Pre-LN and Peri-LN are very similar, and Post-LN's angles are smaller",
    quantity="angle",
)
def peri_angular__init(trials: Trials) -> Finding:
    pre, peri, post = (
        numbers(trials.tuned(), p, "angular_distance", mean_angle, at="init") for p in ("pre_ln", "peri_ln", "post_ln")
    )
    alike = equivalent_values(pre, peri, within=ALIKE, names=("mean angle at init: Pre-LN", "Peri-LN"))
    return all_of(alike, compare_values(post, peri, share=LEAST, names=("Post-LN", "Peri-LN")))


@claim(
    says="The last third of Peri-LN's layers changes the hidden states' direction less with output gains fixed at 1 "
    "than with learned gains",
    paper="Figure 39d: the deep layers change the direction less",
)
def peri_angular__fixed(trials: Trials) -> Finding:
    fixed, learned = (numbers(trials.tuned(), arm, "angular_distance", deep_angle) for arm in (FIXED, "peri_ln"))
    return compare_values(fixed, learned, share=LEAST, names=("deep layers' angle, gains fixed", "learned"))
