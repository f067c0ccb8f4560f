"""Mix-LN Table 4: the column ``accuracy`` is top-1 as a share."""

from lamina.lab.papers.judging import Finding, Trials, claim, equivalent, higher


@claim(
    says="In ViT-Small, Mix-LN has a higher accuracy than Pre-LN",
    paper="Accuracy: Pre-LN 75.99, Mix-LN 76.40",
    quantity="accuracy",
)
def mix_vit(trials: Trials) -> Finding:
    return higher(trials.tuned().where(size="small"), "mix_ln", than="pre_ln", column="accuracy", by=0.001)


@claim(
    says="In ViT-Tiny, Mix-LN and Pre-LN have the same accuracy",
    paper="Accuracy 67.30 and 67.34",
    quantity="accuracy",
)
def mix_vit__tiny(trials: Trials) -> Finding:
    return equivalent(trials.tuned().where(size="tiny"), "mix_ln", "pre_ln", column="accuracy", within=0.003)
