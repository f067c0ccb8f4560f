"""Mix-LN Table 2: the column ``score`` is the mean accuracy over the tasks in percent."""

from lamina.lab.papers.judging import Finding, Trials, at_other_budgets, better_at_equal_loss, claim, higher

MIX, PRE = ({"placement": placement, "budget": "1x"} for placement in ("mix_ln", "pre_ln"))


@claim(
    says="After fine-tuning on Commonsense170K, Mix-LN has a higher mean accuracy than Pre-LN",
    paper="Mean accuracy: Mix-LN 41.34, Pre-LN 36.93 (250M, Mix-LN is better on 7 of 7 tasks). Mix-LN 44.66, "
    "Pre-LN 43.01 (1B, Mix-LN is better on 6 of 7 tasks)",
)
def mix_sft(trials: Trials) -> Finding:
    return better_at_equal_loss(trials, MIX, than=PRE, longer=at_other_budgets(trials, PRE), stage="tasks")


@claim(says="If Pre-LN is pretrained longer, its mean accuracy after fine-tuning is higher")
def mix_sft__budget(trials: Trials) -> Finding:
    return higher(trials.tuned().where(stage="tasks"), {**PRE, "budget": "2x"}, than=PRE, column="score", by=1.0)
