"""Combinations of FuseNorm, Keel, Mix-LN and Peri-LN against their parts."""

from lamina.lab.papers.judging import Finding, Trials, all_of, any_of, claim, lower

FUSED = ("fused keel, root of N", "fused keel, N", "fused keel, 2 N")


@claim(says="Keel with FuseNorm's skip and one of three alphas has a lower loss than FuseNorm and than Keel")
def seeds_add(trials: Trials) -> Finding:
    return any_of(*(_beats(trials, arm, "fusenorm", "keel") for arm in FUSED))


@claim(
    says="With more steps, Keel with FuseNorm's skip (alpha = N) has a lower loss than FuseNorm and than Keel",
    quantity="loss",
)
def seeds_add__longer(trials: Trials) -> Finding:
    return _beats(trials, "fused keel, N", "fusenorm", "keel", budget="longer")


@claim(says="Mix-LN with Keel in the upper layers has a lower loss than Mix-LN and than Keel")
def seeds_add__mix_keel(trials: Trials) -> Finding:
    return _beats(trials, "mix with keel", "mix_ln", "keel")


@claim(says="Mix-LN with Peri-LN in the upper layers has a lower loss than Mix-LN and than Peri-LN")
def seeds_add__mix_peri(trials: Trials) -> Finding:
    return _beats(trials, "mix with peri_ln", "mix_ln", "peri_ln")


def _beats(trials: Trials, arm: str, *parts: str, budget: str = "once") -> Finding:
    tuned = trials.tuned().where(budget=budget)
    return all_of(*(lower(tuned, arm, than=part) for part in parts))
