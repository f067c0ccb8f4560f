"""Kendall's tau between the rankings at two sizes; below 0.6 a proxy of the small size is not to be trusted."""

from lamina.lab.papers.judging import Finding, Trials, claim, denied, same_order, values_of

TRUSTED = 0.6


@claim(
    says="The small models rank the placements differently from the larger models (Kendall's tau below 0.6)",
    paper="Rankings at 10M parameters differ from rankings at 85M",
)
def depth_proxy(trials: Trials) -> Finding:
    return denied(_order(trials, "small", "larger"))


@claim(says="Models of twice the width rank the placements as the small models do (Kendall's tau of at least 0.6)")
def depth_proxy__wide(trials: Trials) -> Finding:
    return _order(trials, "small", "wide")


@claim(
    says="Models trained on 20 tokens per parameter rank the placements as the small models do (Kendall's tau of at "
    "least 0.6)",
)
def depth_proxy__tokens(trials: Trials) -> Finding:
    return _order(trials, "small", "tokens")


def _order(trials: Trials, a: str, b: str) -> Finding:
    tuned = trials.tuned()
    losses = [{arm: values_of(tuned.where(size=size), arm) for arm in _placements(trials)} for size in (a, b)]
    return same_order(*losses, at_least=TRUSTED, name=f"{a} and {b}:")


def _placements(trials: Trials) -> list[str]:
    return [str(placement) for placement in trials.values("placement")]
