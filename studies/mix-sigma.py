"""Mix-LN Eq 5-7: sigma at the norms' inputs grows above 1, so their Jacobians shrink."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import layer_means, numbers, rows

PROBE = "hidden_states"


def sigma(table: Frame) -> float:
    """The mean over the layers of the standard deviation that their norms divide by."""
    return float(layer_means(rows(table, metric="sigma", role=["pre_norm", "post_norm"])).mean())


def _grows(trials: Trials, arm: str) -> Finding:
    start, end = numbers(trials, arm, PROBE, sigma, at="init"), numbers(trials, arm, PROBE, sigma)
    grown = compare_values(end, start, lower=False, by=0.05, names=(f"{arm} trained", "at the start"))
    return all_of(grown, above(end, 1.0, name=f"{arm} sigma"))


@claim(
    says="During training, the standard deviation of the norms' inputs grows above 1 in Pre-LN and in Mix-LN",
    paper='"sigma gradually grows larger than one during training" (no number)',
    quantity="standard deviation, mean over layers",
)
def mix_sigma(trials: Trials) -> Finding:
    tuned = trials.tuned()
    return all_of(_grows(tuned, "pre_ln"), _grows(tuned, "mix_ln"))


@claim(
    says="During training, the standard deviation of the norms' inputs grows above 1 in Post-LN",
    paper="In Post-LN, the gradient's factor is the product of 1 / sigma over the layers",
    quantity="standard deviation, mean over layers",
)
def mix_sigma__post(trials: Trials) -> Finding:
    return _grows(trials.tuned(), "post_ln")
