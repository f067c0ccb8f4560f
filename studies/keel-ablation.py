"""KEEL, Section 4.2."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower

STEPS = ("keel(variant=scale)", "keel(variant=scale_gain)")


@claim(
    says="Keel without its inner norms, or with gains instead of these norms, has a higher loss than Pre-LN and than "
    "the original Keel",
    paper='Both variants "trail Pre-LN"',
)
def keel_ablation(trials: Trials) -> Finding:
    return all_of(keel_ablation__pre_ln(trials), keel_ablation__keel(trials))


@claim(says="Keel without its inner norms, or with gains instead of these norms, has a higher loss than Pre-LN")
def keel_ablation__pre_ln(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), "pre_ln", than=step) for step in STEPS))


@claim(
    says="Keel without its inner norms, or with gains instead of these norms, has a higher loss than the original Keel"
)
def keel_ablation__keel(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), "keel", than=step) for step in STEPS))
