"""Peri-LN Tables 1, 13-15: the column ``score`` is the mean accuracy over the tasks in percent."""

from lamina.lab.papers.judging import Finding, Trials, all_of, at_other_budgets, better_at_equal_loss, claim, higher
from lamina.lab.papers.judging.curves import split

PERI, PRE, POST = ({"placement": name, "budget": "1x"} for name in ("peri_ln", "pre_ln", "post_ln"))


@claim(
    says="After instruction tuning on LIMA, Peri-LN has a higher average score than Pre-LN, and Pre-LN has a higher "
    "score than Post-LN",
    paper="Peri-LN 51.96, Pre-LN 49.96, Post-LN 46.44 (400M). Peri-LN 56.94, Pre-LN 53.89, Post-LN 48.95 "
    "(1.5B). Peri-LN 59.02, Pre-LN 57.08, Post-LN 49.33 (3.2B)",
)
def peri_sft(trials: Trials) -> Finding:
    return all_of(*(part for size in split(trials, "size") for part in (peri_above_pre(size), pre_above_post(size))))


@claim(
    says="After instruction tuning, Peri-LN has a higher average score than Pre-LN",
    paper="Peri-LN and Pre-LN: 51.96 and 49.96 (400M), 56.94 and 53.89 (1.5B), 59.02 and 57.08 (3.2B)",
)
def peri_sft__above_pre(trials: Trials) -> Finding:
    return all_of(*map(peri_above_pre, split(trials, "size")))


def peri_above_pre(trials: Trials) -> Finding:
    """The first of the two differences, with its control."""
    return better_at_equal_loss(trials, PERI, than=PRE, longer=at_other_budgets(trials, PRE), stage="tasks")


def pre_above_post(trials: Trials) -> Finding:
    """The second one, as the paper has it."""
    return higher(trials.tuned().where(stage="tasks"), PRE, than=POST, column="score", by=1.0)
