"""Mix-LN Table 5."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, higher, lower
from lamina.lab.papers.judging.curves import at_rate_of

PRE, SIXTH, QUARTER, THIRD, HALF, POST = (
    {"alpha": share} for share in ("0 %", "16.7 %", "25 %", "33 %", "50 %", "100 %")
)


@claim(
    says="The loss over the share of Post-LN layers is U-shaped, with its best near 25 %",
    paper="perplexity 18.65, 18.34, 18.18, 18.41, 18.55, 18.86, 1434 at 0, 16.7, 25, 33, 41.7, 50, 100 %",
)
def mix_alpha(trials: Trials) -> Finding:
    """The quarter beats both ends and the half: the bottom lies between. Its neighbors are the next claim."""
    return all_of(*(lower(trials.tuned(), QUARTER, than=other) for other in (PRE, HALF, POST)))


@claim(says="A quarter beats a sixth and a third", paper="18.18 against 18.34 and 18.41")
def mix_alpha__quarter(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), QUARTER, than=other) for other in (SIXTH, THIRD)))


@claim(says="Half of the layers as Post-LN is worse than none", paper="18.86 against 18.65 (its text says better)")
def mix_alpha__half(trials: Trials) -> Finding:
    return higher(trials.tuned(), HALF, than=PRE)


@claim(says="With all layers as Post-LN, at the rate that suits none, the model gets stuck", paper="1434")
def mix_alpha__all(trials: Trials) -> Finding:
    return fails_to_train(at_rate_of(trials, POST, PRE), POST)
