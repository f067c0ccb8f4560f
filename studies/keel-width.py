"""Keel, Section 5.3: 3B parameters, deep or wide."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower


@claim(
    says="With equally many parameters, deep Keel has a lower loss than deep Pre-LN and than wide Pre-LN",
    paper="Average score of deep Keel: 55.5, which is 3.2 points above deep Pre-LN and 3.3 points above wide Pre-LN",
)
def keel_width(trials: Trials) -> Finding:
    return all_of(keel_width__deep(trials), keel_width__wide(trials))


@claim(
    says="Deep Keel has a lower loss than deep Pre-LN",
    paper="The average score of deep Keel is 3.2 points higher",
)
def keel_width__deep(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep keel", than="deep pre_ln")


@claim(
    says="Deep Keel has a lower loss than wide Pre-LN",
    paper="The average score of deep Keel is 3.3 points higher",
)
def keel_width__wide(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep keel", than="wide pre_ln")
