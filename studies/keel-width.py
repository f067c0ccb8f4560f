"""Keel, Section 5.3: 3B parameters, deep or wide."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower


@claim(
    says="With as many parameters, deep Keel's loss is below that of deep and of wide Pre-LN",
    paper="average over tasks 55.5: +3.2 over deep, +3.3 over wide Pre-LN",
)
def keel_width(trials: Trials) -> Finding:
    return all_of(keel_width__deep(trials), keel_width__wide(trials))


@claim(says="Deep Keel's loss is below deep Pre-LN's", paper="+3.2 points")
def keel_width__deep(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep keel", than="deep pre_ln")


@claim(says="Deep Keel's loss is below wide Pre-LN's", paper="+3.3 points")
def keel_width__wide(trials: Trials) -> Finding:
    return lower(trials.tuned(), "deep keel", than="wide pre_ln")
