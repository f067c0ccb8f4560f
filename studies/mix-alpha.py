"""Mix-LN Table 5."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, higher, lower
from lamina.lab.papers.judging.curves import at_rate_of

PRE, SIXTH, QUARTER, THIRD, HALF, POST = (
    {"alpha": share} for share in ("0 %", "16.7 %", "25 %", "33 %", "50 %", "100 %")
)


@claim(
    says="The loss is lowest if about 25 % of the layers are Post-LN. The loss rises with a smaller and with a "
    "larger share",
    paper="Perplexity by the share of Post-LN layers: 18.65 (0 %), 18.34 (16.7 %), 18.18 (25 %), 18.41 (33 %), "
    "18.55 (41.7 %), 18.86 (50 %), 1434 (100 %)",
)
def mix_alpha(trials: Trials) -> Finding:
    """The quarter beats both ends and the half: the bottom lies between. Its neighbors are the next claim."""
    return all_of(*(lower(trials.tuned(), QUARTER, than=other) for other in (PRE, HALF, POST)))


@claim(
    says="The loss is lower with a quarter of the layers as Post-LN than with a sixth or a third of the layers",
    paper="Perplexity 18.18 with a quarter, 18.34 with a sixth, 18.41 with a third",
)
def mix_alpha__quarter(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), QUARTER, than=other) for other in (SIXTH, THIRD)))


@claim(
    says="The loss is higher with half of the layers as Post-LN than with no Post-LN layer",
    paper="Perplexity 18.86 with half of the layers, 18.65 with none (the paper's text says the opposite)",
)
def mix_alpha__half(trials: Trials) -> Finding:
    return higher(trials.tuned(), HALF, than=PRE)


@claim(
    says="With all layers as Post-LN, the model gets stuck at the learning rate that suits Pre-LN",
    paper="Perplexity 1434",
)
def mix_alpha__all(trials: Trials) -> Finding:
    return fails_to_train(at_rate_of(trials, POST, PRE), POST)
