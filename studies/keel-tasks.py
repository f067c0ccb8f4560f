"""Keel, Section 5.6. ``score`` is the mean accuracy over the tasks in percent."""

from lamina.lab.papers.judging import Finding, Trials, all_of, at_other_budgets, better_at_equal_loss, claim, higher
from lamina.lab.papers.judging.curves import split

KEEL, PRE = ({"placement": placement, "budget": "1x"} for placement in ("keel", "pre_ln"))


@claim(
    says="After two stages of pretraining and fine-tuning, Keel solves more of GSM-8K than Pre-LN",
    paper="GSM-8K: Keel 58.6, Pre-LN 49.8 (1,024 layers). Keel 43.8, Pre-LN 38.1 (512 layers). Math and code: "
    "Keel is 16.5 % better",
)
def keel_tasks(trials: Trials) -> Finding:
    if "budget" in trials.axes:
        return better_at_equal_loss(
            trials,
            KEEL,
            than=PRE,
            longer=at_other_budgets(trials, PRE),
            stage="tasks",
            column="score_arithmetic",
            by=1.0,
        )
    solved = trials.where(stage="tasks")
    return all_of(
        *(higher(depth, "keel", than="pre_ln", column="score", by=1.0) for depth in split(solved, "num_layers"))
    )


@claim(says="Keel has a higher mean accuracy over all tasks than Pre-LN")
def keel_tasks__mean(trials: Trials) -> Finding:
    if "budget" in trials.axes:
        return better_at_equal_loss(trials, KEEL, than=PRE, longer=at_other_budgets(trials, PRE), stage="tasks")
    return keel_tasks(trials)
