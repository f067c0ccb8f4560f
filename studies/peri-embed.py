"""Peri-LN Figures 20-22."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower, monotone, values_of
from lamina.lab.papers.judging.curves import split

WITH, WITHOUT = {"scheme": "with"}, {"scheme": "without"}


@claim(
    says="A norm after the embedding lowers Peri-LN's loss",
    paper="Figures 20 to 22 (400M, 1.5B, 3.2B): a slightly lower loss. The figures print no numbers",
)
def peri_embed(trials: Trials) -> Finding:
    return all_of(*(lower(part, WITH, than=WITHOUT) for part in split(trials.tuned(), "size")))


@claim(
    says="The smaller the model, the more a norm after the embedding lowers Peri-LN's loss",
    paper="Appendix G.5: the effect is larger in smaller models",
)
def peri_embed__size(trials: Trials) -> Finding:
    """By seed the gain at each size, in the order of the sizes."""
    gains: dict[float, dict[int, float]] = {}
    tuned = trials.tuned()
    for place, size in enumerate(tuned.values("size")):
        arms = [values_of(tuned.where(size=size), arm) for arm in (WITHOUT, WITH)]
        gains[float(place)] = {seed: arms[0][seed] - arms[1][seed] for seed in arms[0].keys() & arms[1].keys()}
    return monotone(gains, rising=False, name="gain by size")
