"""Mix-LN Table 1."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, fails_to_train, lower, trains
from lamina.lab.papers.judging.curves import at_rate_of, split

PRE, MIX, POST, DEEP = ({"scheme": name} for name in ("pre_ln", "mix_ln", "post_ln", "deepnorm"))


@claim(
    says="Mix-LN has a lower loss than Pre-LN, and Pre-LN has a lower loss than DeepNorm and Post-LN",
    paper="Perplexity: Mix-LN 21.39, Pre-LN 21.92, DeepNorm 22.77, Post-LN 1409 (250M). Mix-LN 33.12, Pre-LN "
    "34.77, DeepNorm 34.87, Post-LN 35.18 (71M)",
)
def mix_ppl(trials: Trials) -> Finding:
    pairs = ((MIX, PRE), (PRE, DEEP), (PRE, POST))
    return all_of(*(lower(size, a, than=b) for size in split(trials.tuned(), "size") for a, b in pairs))


@claim(
    says="Mix-LN has a lower loss than Pre-LN",
    paper="Mix-LN's perplexity is lower by 1.65 (71M), 0.71 (130M), 0.53 (250M) and 0.47 (1B)",
)
def mix_ppl__below_pre(trials: Trials) -> Finding:
    return all_of(*(lower(size, MIX, than=PRE) for size in split(trials.tuned(), "size")))


@claim(
    says="Post-LN with 24 layers or more does not train at the learning rate that suits Pre-LN",
    paper="Perplexity: Post-LN 1409 (250M) and 1412 (1B), DeepNorm 1411 (1B). Post-LN and DeepNorm train at 71M and "
    "130M",
)
def mix_ppl__post_fails(trials: Trials) -> Finding:
    if "size" not in trials.axes:
        return fails_to_train(at_rate_of(trials, POST, PRE), POST)
    large = [fails_to_train(trials, {"size": size, **POST}) for size in ("250m", "1b")]
    small = [trains(trials, {"size": size, **POST}) for size in ("71m", "130m")]
    return all_of(*large, *small, fails_to_train(trials, {"size": "1b", **DEEP}))
