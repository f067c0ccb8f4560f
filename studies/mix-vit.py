"""Mix-LN Table 4: the column ``accuracy`` is top-1 as a share."""

from lamina.lab.papers.judging import Finding, Trials, claim, equivalent, higher


@claim(says="Mix-LN's accuracy is above Pre-LN's in ViT-Small", paper="75.99 to 76.40")
def mix_vit(trials: Trials) -> Finding:
    return higher(trials.tuned().where(size="small"), "mix_ln", than="pre_ln", column="accuracy", by=0.001)


@claim(says="In ViT-Tiny the two are level", paper="67.30 and 67.34")
def mix_vit__tiny(trials: Trials) -> Finding:
    return equivalent(trials.tuned().where(size="tiny"), "mix_ln", "pre_ln", column="accuracy", within=0.003)
