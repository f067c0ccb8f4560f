"""Check numbers by seed: compare them with other numbers, a bound, a formula or an order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from lamina.core.intervals import ALPHA
from lamina.lab.papers.judging.findings import (
    TOO_FEW,
    BySeed,
    Finding,
    Region,
    Verdict,
    inconclusive,
    mean,
    number,
    p_text,
    pairs_in,
    seeds_text,
)
from lamina.lab.papers.judging.statistics import kendall, p_above, tau_draws

_RANKED = 5  # arms below which a ranking says little


def compare_values(
    a: BySeed,
    b: BySeed,
    *,
    by: float | None = None,
    share: float | None = None,
    lower: bool = True,
    names: tuple[str, str] = ("a", "b"),
) -> Finding:
    """Judge whether a is below b (with ``lower=False``: above b), paired over the seeds that a and b share.

    The smallest difference that counts is ``by`` in the values' unit, or ``share`` of the mean of b. Give either ``by``
    or ``share``. Use ``share`` if the size of a quantity depends on the model, such as an angle per layer.
    """
    assert (by is None) != (share is None)
    if share is not None:
        by = share * abs(mean([value for value in b.values() if math.isfinite(value)] or [0.0]))
    assert by is not None
    region = Region(below=0.0, least=by) if lower else Region(above=0.0, least=by)
    return pairs_in(region, a, b, names=names)


def equivalent_values(a: BySeed, b: BySeed, *, within: float, names: tuple[str, str] = ("a", "b")) -> Finding:
    """Judge whether a and b, paired over the seeds, differ by less than ``within`` (two one-sided tests).

    ``within`` is in the values' unit. If the test shows a larger difference, the verdict is `fails`, because a claim of
    equality has no opposite.
    """
    region = Region(above=-within, below=within, text=f", claimed within {number(within)}")
    return pairs_in(region, a, b, names=names)


def below(values: BySeed, limit: float, *, name: str = "") -> Finding:
    """Judge whether the values' mean is below a limit, by one-sided tests in both directions at 2.5 % each."""
    return _bounded(values, Region(below=limit, text=f", claimed below {number(limit)}"), name)


def above(values: BySeed, limit: float, *, name: str = "") -> Finding:
    """Judge whether the values' mean is above a limit."""
    return _bounded(values, Region(above=limit, text=f", claimed above {number(limit)}"), name)


def close(
    ours: float | BySeed, expected: float, tolerance: float, *, name: str = "", seeds: int | None = None
) -> Finding:
    """Judge whether every number differs from an exact value by at most ``tolerance``, relative to the value (absolute
    for 0).

    Use this check for a formula, not for a mean: a single number outside the tolerance makes the claim fail. If the
    number of values differs from the number of seeds, give the number of seeds in ``seeds``.
    """
    values = list(ours.values()) if isinstance(ours, Mapping) else [float(ours)]
    scale = abs(expected) or 1.0
    worst = max(
        (abs(value - expected) / scale for value in values), key=lambda miss: math.inf if miss != miss else miss
    )
    return Finding(
        verdict=Verdict.HOLDS if worst <= tolerance else Verdict.FAILS,
        ours=f"{name} {number(mean(values))}, expected {number(expected)} (at most {100 * worst:.2g} % off)".strip(),
        margin=worst,
        seeds=len(values) if seeds is None else seeds,
    )


def monotone(values: Mapping[float, BySeed], *, rising: bool = True, name: str = "", at_least: float = 0.6) -> Finding:
    """Judge whether values rise (or fall) with x. ``values`` maps each x to values by seed.

    The claim holds under two conditions. First, Kendall's tau between x and value, averaged over the seeds, is at least
    ``at_least`` in the claimed direction. Second, value has a slope over the rank of x in the claimed direction
    (one-sided t test over the seeds, 2.5 %). The claim is reversed if both conditions are true in the other direction.
    Lamina leaves out a seed if a value at some x is missing or not finite.
    """
    xs = sorted(values)
    seeds = sorted(set.intersection(*({s for s, v in values[x].items() if math.isfinite(v)} for x in xs)))
    places = ", ".join(f"{x:g}" for x in xs)
    course = ", ".join(number(mean([values[x][seed] for seed in seeds])) if seeds else "-" for x in xs)
    text = f"{name} {course} at {places}".strip()
    if len(seeds) < TOO_FEW:
        return inconclusive(text, f"fewer than {TOO_FEW} seeds with all of {places}", len(seeds))
    sign = 1 if rising else -1
    tau = mean([kendall(xs, [sign * values[x][seed] for x in xs]) for seed in seeds])
    ranks = range(len(xs))
    slopes = [statistics.linear_regression(ranks, [sign * values[x][seed] for x in xs]).slope for seed in seeds]
    p, p_not = p_above(slopes), p_above([-slope for slope in slopes])
    verdict = Verdict.HOLDS if tau >= at_least and p < ALPHA else Verdict.INCONCLUSIVE
    verdict = Verdict.REVERSED if tau <= -at_least and p_not < ALPHA else verdict
    shown = p_text(p_not if verdict.failed else p)
    return Finding(
        verdict=verdict,
        ours=f"{text}: {'rising' if rising else 'falling'} with tau {tau:.2f} ({seeds_text(len(seeds))}, {shown})",
        margin=tau,
        p=p,
        p_not=p_not,
        seeds=len(seeds),
    )


def same_order(a: Mapping[str, BySeed], b: Mapping[str, BySeed], *, at_least: float = 0.6, name: str = "") -> Finding:
    """Judge by Kendall's tau whether two mappings rank the arms in the same order. Each mapping contains the values of
    each arm by seed.

    The claim holds if a test at 2.5 % shows that tau is at least ``at_least``. The claim is reversed if the test shows
    that tau is below ``at_least``. Lamina ranks the arms by their means, and the test draws the means from their t
    distributions. An arm without a value ranks last.
    """
    arms = sorted(a.keys() & b.keys())
    seeds = min(len(set().union(*side.values())) for side in (a, b))
    if len(arms) < _RANKED or seeds < TOO_FEW:
        few = f"fewer than {_RANKED} arms" if len(arms) < _RANKED else f"fewer than {TOO_FEW} seeds"
        return inconclusive(f"{name} {len(arms)} arms", few, seeds)
    means = ([mean([*side[arm].values()]) if side[arm] else math.inf for arm in arms] for side in (a, b))
    tau = kendall(*means)
    draws = sorted(tau_draws(*([list(side[arm].values()) for arm in arms] for side in (a, b))))
    count = len(draws)
    low, high = draws[round(ALPHA / 2 * count)], draws[round((1 - ALPHA / 2) * count) - 1]
    p, p_not = (
        min(1.0, 2 * (1 + sum(map(misses, draws))) / (1 + count))
        for misses in (lambda draw: draw < at_least - 1e-9, lambda draw: draw >= at_least - 1e-9)
    )
    verdict = Verdict.HOLDS if p < ALPHA else Verdict.REVERSED if p_not < ALPHA else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=f"{name} Kendall's tau {tau:.2f} over {len(arms)} arms (95 % {low:.2f} to {high:.2f}, "
        f"{seeds_text(seeds)}, {p_text(p_not if verdict.failed else p)}), claimed at least {at_least:g}".strip(),
        margin=tau,
        interval=(low, high),
        p=p,
        p_not=p_not,
        seeds=seeds,
    )


def fraction(flags: Iterable[bool], *, at_least: float, name: str = "", seeds: int = 0) -> Finding:
    """Judge whether a share of cases (layers, pairs, steps) is at least ``at_least``.

    The check counts cases, and runs no statistical test. With fewer than 3 cases, the claim is inconclusive.
    """
    cases = [bool(flag) for flag in flags]
    if not cases:
        return inconclusive(f"{name} no case", "nothing to count")
    share, few = sum(cases) / len(cases), len(cases) < TOO_FEW
    verdict = Verdict.HOLDS if share >= at_least else Verdict.FAILS
    return Finding(
        verdict=Verdict.INCONCLUSIVE if few else verdict,
        ours=f"{name} {sum(cases)} of {len(cases)} (claimed: at least {at_least:.0%})".strip(),
        margin=share,
        seeds=seeds,
        note=f"fewer than {TOO_FEW} cases" if few else "",
    )


def _bounded(values: BySeed, region: Region, name: str) -> Finding:
    numbers = [float(value) for value in values.values() if math.isfinite(value)]
    if len(numbers) < TOO_FEW:
        ours = f"{name} {', '.join(map(number, numbers)) or 'no value'}{region.text}"
        return inconclusive(ours, f"fewer than {TOO_FEW} seeds", len(numbers))
    return region.find(numbers, name=name)
