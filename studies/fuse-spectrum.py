"""FuseNorm Figure 8: the sorted eigenvalues of the embedding over their median."""

import math

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import numbers, rows


def spectrum(table: Frame) -> Frame:
    """The eigenvalues over their median, largest first."""
    eigenvalues = rows(table, metric="eigenvalue_over_median", role="embedding")
    return eigenvalues.groupby("index")["value"].mean().sort_index()


def head(table: Frame) -> float:
    """log10 of the largest eigenvalue over the median."""
    return math.log10(spectrum(table).iloc[0])


def tail(table: Frame) -> float:
    """log10 of the median over the eigenvalue at 95 % of the rank: the last few may be rounding."""
    values = spectrum(table)
    return -math.log10(values.iloc[round(0.95 * (len(values) - 1))])


def _lower(trials: Trials, value, than: str, what: str) -> Finding:
    fuse, other = (numbers(trials, arm, "spectra", value) for arm in ("fusenorm", than))
    return compare_values(fuse, other, by=0.05, names=(f"log10 of {what}: fusenorm", than))


@claim(
    says="The embedding's largest eigenvalue, divided by the median eigenvalue, is smaller with FuseNorm than with "
    "Pre-LN and HybridNorm",
    paper="Figure 8 shows curves without numbers",
)
def fuse_spectrum(trials: Trials) -> Finding:
    """Flatter at the head: the largest eigenvalue is fewer times the median."""
    return all_of(
        *(
            _lower(trials.tuned(), head, arm, "the largest eigenvalue divided by the median")
            for arm in ("pre_ln", "hybridnorm")
        )
    )


@claim(
    says="The embedding's largest eigenvalue, divided by the median eigenvalue, is smaller with FuseNorm than with "
    "Pre-LN",
    paper="Figure 8 shows curves without numbers",
)
def fuse_spectrum__pre(trials: Trials) -> Finding:
    return _lower(trials.tuned(), head, "pre_ln", "the largest eigenvalue divided by the median")


@claim(
    says="The embedding's largest eigenvalue is closer to the median with Mix-LN than with Pre-LN. The smallest "
    "eigenvalues are farther from the median with Mix-LN than with FuseNorm",
    paper='Figure 8: Mix-LN "suffers from a rapid decay in the tail spectrum"',
)
def fuse_spectrum__mix(trials: Trials) -> Finding:
    tuned = trials.tuned()
    mix, pre = (numbers(tuned, arm, "spectra", head) for arm in ("mix_ln", "pre_ln"))
    flatter = compare_values(
        mix, pre, by=0.05, names=("log10 of the largest eigenvalue divided by the median: mix_ln", "pre_ln")
    )
    return all_of(flatter, _lower(tuned, tail, "mix_ln", "the median eigenvalue divided by a small eigenvalue"))
