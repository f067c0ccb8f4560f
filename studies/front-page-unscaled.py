"""The four seeds against Pre-LN, no branch scaled by depth: studies/preregistration/front-page-unscaled.md has it."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width and does "
    "not scale branches by depth",
    quantity="loss in nats per byte",
)
def front_page_unscaled(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="Keel has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width and does not "
    "scale branches by depth",
    quantity="loss in nats per byte",
)
def front_page_unscaled__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(
    says="Mix-LN has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width and does not "
    "scale branches by depth",
    quantity="loss in nats per byte",
)
def front_page_unscaled__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(
    says="Peri-LN has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width and does "
    "not scale branches by depth",
    quantity="loss in nats per byte",
)
def front_page_unscaled__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
