"""Claims and their verdicts: the names that a study's Python file imports."""

from lamina.papers.judging.checks import (
    equivalent,
    fails_to_train,
    higher,
    lower,
    no_worse,
    optimum,
    ordered,
    trains,
    values_of,
)
from lamina.papers.judging.claims import Claim, Judged, claim, judge, load_claims
from lamina.papers.judging.findings import Finding, Verdict, all_of, any_of, denied, needs_scale
from lamina.papers.judging.matched import (
    Budget,
    at_equal_kl,
    at_loss,
    at_other_budgets,
    better_at_equal_loss,
    frontiers,
    iso_loss,
)
from lamina.papers.judging.rates import spreads
from lamina.papers.judging.trials import NotMeasured, Trials, label
from lamina.papers.judging.value_checks import (
    above,
    below,
    close,
    compare_values,
    equivalent_values,
    fraction,
    monotone,
    same_order,
)

__all__ = [
    "Budget",
    "Claim",
    "Finding",
    "Judged",
    "NotMeasured",
    "Trials",
    "Verdict",
    "above",
    "all_of",
    "any_of",
    "at_equal_kl",
    "at_loss",
    "at_other_budgets",
    "below",
    "better_at_equal_loss",
    "claim",
    "close",
    "compare_values",
    "denied",
    "equivalent",
    "equivalent_values",
    "fails_to_train",
    "fraction",
    "frontiers",
    "higher",
    "iso_loss",
    "judge",
    "label",
    "load_claims",
    "lower",
    "monotone",
    "needs_scale",
    "no_worse",
    "optimum",
    "ordered",
    "same_order",
    "spreads",
    "trains",
    "values_of",
]
