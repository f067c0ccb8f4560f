"""Peri-LN Propositions 3.1, C.1-C.3."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, close, fraction
from lamina.lab.papers.judging.curves import rows

STATEMENTS = {"pre_ln": "peri_ln_c1", "peri_ln": "peri_ln_c2", "post_ln": "peri_ln_c3"}
PROBE = "bounds(sequences=4)"
ROUNDING = 1e-3


def ratios(trials: Trials, placement: str, role: str) -> dict[int, list[float]]:
    """By seed, left over right at init and after training, however the run ended: it is algebra."""
    found: dict[int, list[float]] = {}
    for at in ("init", "end"):
        table: Frame = rows(trials.tuned().arm(placement).measure(PROBE, at=at), role=role, metric="ratio")
        for seed, value in zip(table["seed"], table["value"], strict=True):
            found.setdefault(int(seed), []).append(float(value))
    return found


def never_above(trials: Trials, placement: str) -> Finding:
    by_seed = ratios(trials, placement, f"{STATEMENTS[placement]}_token")
    worst = [value for values in by_seed.values() for value in values]
    name = f"{placement}: left side / right side of the worst token {min(worst):.3g} to {max(worst):.3g}, at most 1 in"
    return fraction((value <= 1 + ROUNDING for value in worst), at_least=1.0, name=name, seeds=len(by_seed))


@claim(
    says="For every token, the gradient of the last down-projection stays below the paper's bounds for Peri-LN (C.2) "
    "and Post-LN (C.3)",
    paper="Eq 8: at most 4 gamma sqrt(D) ||h|| / ||a||. Eq 10 has ||x + a|| in place of ||a||",
    quantity="gradient norm divided by its bound",
    exact=True,
)
def peri_bound(trials: Trials) -> Finding:
    return all_of(never_above(trials, "peri_ln"), never_above(trials, "post_ln"))


@claim(
    says="For each token in Pre-LN, the gradient norm of the last down-projection's weights is ||h|| times the "
    "gradient norm of the projection's output (h is the projection's input)",
    paper="Eq 6 and 11: the gradient is proportional to h, without damping",
    quantity="gradient norm divided by its formula",
    exact=True,
)
def peri_bound__proportional(trials: Trials) -> Finding:
    by_seed = ratios(trials, "pre_ln", "peri_ln_c1_token")
    worst = {seed: max(values, key=lambda value: abs(value - 1)) for seed, values in by_seed.items()}
    return close(worst, 1.0, ROUNDING, name="left side / right side")
