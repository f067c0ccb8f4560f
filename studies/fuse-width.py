"""FuseNorm Figure 4: which learning rates train is the same on a narrow proxy and on a wide target."""

from lamina.lab.papers.judging import Finding, Trials, Verdict, claim, fraction
from lamina.lab.papers.judging.checks import TRAINED


def trains_at(trials: Trials, width: str) -> dict[float, bool]:
    """By learning rate whether more than half of the seeds trained to the end."""
    table = trials.where(width=width).table
    return {float(rate): rows["status"].isin(TRAINED).mean() > 0.5 for rate, rows in table.groupby("learning_rate")}


@claim(
    says="The narrow and the wide model fail at the same learning rates, and train at the same learning rates",
    paper="Figure 4: widths 640 and 2560, 64 layers. The figure prints no learning rate",
)
def fuse_width(trials: Trials) -> Finding:
    """At all rates. A sweep where all train or all fail shows nothing."""
    narrow, wide = trains_at(trials, "narrow"), trains_at(trials, "wide")
    course = ", ".join(
        f"{rate:g}: {'trains' if narrow[rate] else 'fails'} and {'trains' if wide[rate] else 'fails'}"
        for rate in sorted(narrow)
    )
    seeds = len(trials.seeds)
    if seeds < 3 or len(set(narrow.values()) | set(wide.values())) < 2:
        note = "fewer than 3 seeds" if seeds < 3 else "no border in the sweep: all rates train, or none does"
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=course, seeds=seeds, note=note)
    agree = [narrow[rate] == wide[rate] for rate in narrow]
    agreement = fraction(
        agree, at_least=1.0, name="learning rates at which the narrow and the wide model agree", seeds=seeds
    )
    return agreement.noted(f"narrow and wide at {course}")
