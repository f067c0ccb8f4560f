"""Mix-LN Table 6."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower, ordered

MIX, GROUP, SANDWICH, PRE, ADMIN = (
    {"scheme": name} for name in ("mix_ln", "group_ln", "sandwich_ln", "pre_ln", "admin")
)


@claim(
    says="The losses rise in this order: Mix-LN, Group-LN, Sandwich-LN, Pre-LN, Admin",
    paper="Perplexity (250M): Mix-LN 22.33, Group-LN 23.10, Sandwich-LN 23.26, Pre-LN 23.39, Admin 24.82",
)
def mix_others(trials: Trials) -> Finding:
    return ordered(trials.tuned(), [MIX, GROUP, SANDWICH, PRE, ADMIN])


@claim(
    says="Mix-LN has a lower loss than Group-LN, Sandwich-LN, Pre-LN and Admin",
    paper="Perplexity 22.33 (Mix-LN), and 23.10 or more (the others)",
)
def mix_others__best(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), MIX, than=other) for other in (GROUP, SANDWICH, PRE, ADMIN)))


@claim(
    says="Group-LN and Sandwich-LN have slightly lower losses than Pre-LN, and Admin has a higher loss than Pre-LN",
    paper="Perplexity: Group-LN 23.10, Sandwich-LN 23.26, Pre-LN 23.39, Admin 24.82",
)
def mix_others__around_pre(trials: Trials) -> Finding:
    tuned = trials.tuned()
    return all_of(lower(tuned, GROUP, than=PRE), lower(tuned, SANDWICH, than=PRE), lower(tuned, PRE, than=ADMIN))
