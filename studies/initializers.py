"""Whether the initializer decides more than the placement, written before the first of its trials."""

from lamina.lab.papers.judging import Finding, Trials, all_of, any_of, claim, compare_values, lower, values_of

PLACEMENTS = ("pre_ln", "fusenorm", "peri_ln")
NATS = 0.01  # the smallest difference in loss that counts


def _gain(trials: Trials, worse: str, better: str) -> dict[int, float]:
    """By seed, how far one arm's loss lies above another's."""
    high, low = (values_of(trials.tuned(), arm) for arm in (worse, better))
    return {seed: high[seed] - low[seed] for seed in high.keys() & low.keys()}


@claim(
    says="A width-aware initializer lowers Pre-LN's loss more than a later change from Pre-LN to FuseNorm",
    one_learned=True,
)
def initializers(trials: Trials) -> Finding:
    from_initializer = _gain(trials, "pre_ln plain", "pre_ln width-aware")
    from_placement = _gain(trials, "pre_ln width-aware", "fusenorm width-aware")
    return compare_values(
        from_initializer, from_placement, by=NATS, lower=False, names=("initializer's gain", "FuseNorm's gain")
    )


@claim(
    says="With each placement, the width-aware initializer gives a lower loss than the plain initializer",
    one_learned=True,
)
def initializers__each(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), f"{name} width-aware", than=f"{name} plain") for name in PLACEMENTS))


@claim(
    says="With the plain initializer, FuseNorm or Peri-LN has a lower loss than Pre-LN. With the width-aware "
    "initializer, the same placement has a higher loss than Pre-LN",
    one_learned=True,
)
def initializers__sign(trials: Trials) -> Finding:
    def turned(name: str) -> Finding:
        return all_of(
            lower(trials.tuned(), f"{name} plain", than="pre_ln plain"),
            lower(trials.tuned(), "pre_ln width-aware", than=f"{name} width-aware"),
        )

    return any_of(turned("fusenorm"), turned("peri_ln"))
