"""Peri-LN Eq 4: Var(x_(l+1)) = Var(x_l) + beta_0."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, claim, compare_values, equivalent_values
from lamina.lab.papers.judging.curves import numbers, rows

PERI = {"placement": "peri_ln"}
STRAIGHT = 0.95  # R^2 of a straight line
UNCORRELATED = 0.1  # of the sum of the contributions' variances


def line(table: Frame) -> float:
    return float(rows(table, metric="growth_linear_r2")["value"].iloc[0])


def exponential(table: Frame) -> float:
    return float(rows(table, metric="growth_exponential_r2")["value"].iloc[0])


def added(table: Frame) -> float:
    """The stream's variance behind the last layer less that before the first, per variance of what was added."""
    states = rows(table, metric="variance", role="state").set_index("layer")["value"].sort_index()
    contributions = rows(table, metric="variance", role="contribution")["value"].sum()
    return float((states.iloc[-1] - states.iloc[0]) / contributions)


@claim(
    says="The hidden states' variance in Peri-LN grows linearly with depth, before and after training. After training, "
    "a line fits better than an exponential",
    paper="Eq 4 and Figures 1, 6, 14 and 15: linear growth, or slower than exponential",
)
def peri_linear(trials: Trials) -> Finding:
    """Fails where a straight line explains less than 95 % of the variance's course, or an exponential explains more."""
    straight, curved = numbers(trials, PERI, "hidden_states", line), numbers(trials, PERI, "hidden_states", exponential)
    return all_of(
        above(numbers(trials, PERI, "hidden_states", line, at="init"), STRAIGHT, name="R^2 of a line at init"),
        above(straight, STRAIGHT, name="R^2 of a line after training"),
        compare_values(straight, curved, lower=False, by=0.01, names=("R^2 of a line", "R^2 of an exponential")),
    )


@claim(
    says="In Peri-LN, the outputs of the sub-layers are uncorrelated with the residual stream. So their variances add "
    "up to the growth of the stream's variance, within 10 %, before and after training",
    paper="Eq 4 sets Var(x + F) to Var(x) + Var(F)",
)
def peri_linear__uncorrelated(trials: Trials) -> Finding:
    found = []
    for at in ("init", "end"):
        ratio = numbers(trials, PERI, "hidden_states", added, at=at)
        names = (f"growth over added variance at {at}", "exactly")
        found.append(equivalent_values(ratio, dict.fromkeys(ratio, 1.0), within=UNCORRELATED, names=names))
    return all_of(*found)
