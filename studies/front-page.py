"""The four seeds against Pre-LN, as studies/preregistration/front-page.md has it."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width",
    quantity="loss in nats per byte",
)
def front_page(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="Keel has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width",
    quantity="loss in nats per byte",
)
def front_page__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(
    says="Mix-LN has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width",
    quantity="loss in nats per byte",
)
def front_page__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(
    says="Peri-LN has a lower loss than Pre-LN after 400 steps, with an initializer that suits the width",
    quantity="loss in nats per byte",
)
def front_page__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
