"""The four seeds against Pre-LN, at 0.02: the sensitivity that studies/preregistration/front-page.md names."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm has a lower loss than Pre-LN after 400 steps, with an initial standard deviation of 0.02",
    quantity="loss in nats per byte",
)
def front_page_scaled(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(
    says="Keel has a lower loss than Pre-LN after 400 steps, with an initial standard deviation of 0.02",
    quantity="loss in nats per byte",
)
def front_page_scaled__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(
    says="Mix-LN has a lower loss than Pre-LN after 400 steps, with an initial standard deviation of 0.02",
    quantity="loss in nats per byte",
)
def front_page_scaled__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(
    says="Peri-LN has a lower loss than Pre-LN after 400 steps, with an initial standard deviation of 0.02",
    quantity="loss in nats per byte",
)
def front_page_scaled__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
