"""Keel, Section 5.3: 3B parameters, deep or wide."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower


@claim(
    says="With equally many parameters, deep Keel's loss is below deep Pre-LN's and below wide Pre-LN's",
    paper="Average score of 55.5: 3.2 points above deep Pre-LN, 3.3 points above wide Pre-LN",
)
def keel_width(trials: Trials) -> Finding:
    return all_of(keel_width__deep(trials), keel_width__wide(trials))


@claim(
    says="Deep Keel's loss is below deep Pre-LN's",
    paper="Deep Keel's average score is 3.2 points above deep Pre-LN's",
)
def keel_width__deep(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep keel", than="deep pre_ln")


@claim(
    says="Deep Keel's loss is below wide Pre-LN's",
    paper="Deep Keel's average score is 3.3 points above wide Pre-LN's",
)
def keel_width__wide(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep keel", than="wide pre_ln")
