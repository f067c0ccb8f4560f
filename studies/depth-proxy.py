"""Kendall's tau between the rankings at two sizes; below 0.6 a proxy of the small size is not to be trusted."""

import math

from lamina.studies.judging import Finding, Trials, claim, denied, same_order, values_of

TRUSTED = 0.6


@claim(
    says="The ranking at the small size is not that of the larger one: Kendall's tau is below 0.6",
    paper="rankings at 10M parameters are not those at 85M",
)
def depth_proxy(trials: Trials) -> Finding:
    return denied(_order(trials, "small", "larger"))


@claim(says="Twice the width has the same ranking: Kendall's tau is at least 0.6")
def depth_proxy__wide(trials: Trials) -> Finding:
    return _order(trials, "small", "wide")


@claim(says="20 tokens per parameter have the same ranking: Kendall's tau is at least 0.6")
def depth_proxy__tokens(trials: Trials) -> Finding:
    return _order(trials, "small", "tokens")


def _order(trials: Trials, a: str, b: str) -> Finding:
    tuned = trials.tuned()
    means = [{arm: _mean(tuned.where(size=size), arm) for arm in _placements(trials)} for size in (a, b)]
    return same_order(*means, at_least=TRUSTED, name=f"{a} and {b}:")


def _placements(trials: Trials) -> list[str]:
    return [str(placement) for placement in trials.values("placement")]


def _mean(trials: Trials, arm: str) -> float:
    """The mean loss of the seeds that trained; infinite where none did, so that it ranks last."""
    losses = list(values_of(trials, arm).values())
    return sum(losses) / len(losses) if losses else math.inf
