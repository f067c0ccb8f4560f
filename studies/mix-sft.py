"""Mix-LN Table 2: the column ``accuracy`` is the mean over the tasks, in percent, one row per seed."""

from lamina.studies.judging import Finding, Trials, claim, higher


@claim(
    says="After fine-tuning on Commonsense170K, Mix-LN's mean accuracy is above Pre-LN's",
    paper="36.93 to 41.34 (250M, 7 of 7 tasks), 43.01 to 44.66 (1B, 6 of 7)",
)
def mix_sft(trials: Trials) -> Finding:
    return higher(trials, "mix_ln", than="pre_ln", column="accuracy")
