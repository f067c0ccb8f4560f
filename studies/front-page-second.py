"""The four seeds against Pre-LN, on a second text: the confirmation of studies/preregistration/front-page.md."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="FuseNorm's loss is below Pre-LN's after 400 steps, at an initializer that suits the width, on a second text"
)
def front_page_second(trials: Trials) -> Finding:
    return lower(trials.tuned(), "fusenorm", than="pre_ln")


@claim(says="Keel's loss is below Pre-LN's after 400 steps, at an initializer that suits the width, on a second text")
def front_page_second__keel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "keel", than="pre_ln")


@claim(says="Mix-LN's loss is below Pre-LN's after 400 steps, at an initializer that suits the width, on a second text")
def front_page_second__mix_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")


@claim(
    says="Peri-LN's loss is below Pre-LN's after 400 steps, at an initializer that suits the width, on a second text"
)
def front_page_second__peri_ln(trials: Trials) -> Finding:
    return lower(trials.tuned(), "peri_ln", than="pre_ln")
