"""KEEL, Section 4.2."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower

STEPS = ("keel(variant=scale)", "keel(variant=scale_gain)")


@claim(
    says="Scale alone, and scale with a gain but without the inner norm, have a higher loss than Pre-LN and Keel",
    paper='"trail Pre-LN"',
)
def keel_ablation(trials: Trials) -> Finding:
    return all_of(keel_ablation__pre_ln(trials), keel_ablation__keel(trials))


@claim(says="Both steps have a higher loss than Pre-LN")
def keel_ablation__pre_ln(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), "pre_ln", than=step) for step in STEPS))


@claim(says="Both steps have a higher loss than Keel: the inner norm is what they lack")
def keel_ablation__keel(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), "keel", than=step) for step in STEPS))
