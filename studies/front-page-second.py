"""The four seeds against Pre-LN, on a second text: the confirmation of studies/preregistration/front-page.md."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="On a second text, FuseNorm has a lower loss than Pre-LN after 400 steps, with an initializer that suits "
    "the width",
    quantity="loss in nats per byte",
)
def front_page_second(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="On a second text, Keel has a lower loss than Pre-LN after 400 steps, with an initializer that suits the "
    "width",
    quantity="loss in nats per byte",
)
def front_page_second__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(
    says="On a second text, Mix-LN has a lower loss than Pre-LN after 400 steps, with an initializer that suits the "
    "width",
    quantity="loss in nats per byte",
)
def front_page_second__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(
    says="On a second text, Peri-LN has a lower loss than Pre-LN after 400 steps, with an initializer that suits the "
    "width",
    quantity="loss in nats per byte",
)
def front_page_second__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
