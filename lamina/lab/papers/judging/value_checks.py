"""Check values by seed against other values, a limit, a formula or an order."""

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

_RANKED = 5  # the fewest arms for a ranking


def compare_values(
    a: BySeed,
    b: BySeed,
    *,
    by: float | None = None,
    share: float | None = None,
    lower: bool = True,
    names: tuple[str, str] = ("a", "b"),
) -> Finding:
    """Judge whether the values "a" are below the values "b", paired by seed.

    Args:
        by: the smallest difference that counts, in the values' unit. Give either ``by`` or ``share``.
        share: the smallest difference that counts, as a fraction of the mean of "b". Use ``share`` if the size of the
            values depends on the model, such as an angle per layer.
        lower: true tests whether "a" is below "b", and false tests whether "a" is above "b".
    """
    assert (by is None) != (share is None)
    if share is not None:
        by = share * abs(mean([value for value in b.values() if math.isfinite(value)] or [0.0]))
    assert by is not None
    region = Region(below=0.0, least=by) if lower else Region(above=0.0, least=by)
    return pairs_in(region, a, b, names=names)


def equivalent_values(a: BySeed, b: BySeed, *, within: float, names: tuple[str, str] = ("a", "b")) -> Finding:
    """Judge whether the values "a" and "b" differ by less than a limit, paired by seed (two one-sided tests).

    If the test shows a larger difference, the verdict is `fails`.
    """
    region = Region(above=-within, below=within, text=f", claimed within {number(within)}")
    return pairs_in(region, a, b, names=names)


def below(values: BySeed, limit: float, *, name: str = "") -> Finding:
    """Judge whether the values' mean is below a limit, with one-sided tests at 2.5 %."""
    return _bounded(values, Region(below=limit, text=f", claimed below {number(limit)}"), name)


def above(values: BySeed, limit: float, *, name: str = "") -> Finding:
    """Judge whether the values' mean is above a limit, with one-sided tests at 2.5 %."""
    return _bounded(values, Region(above=limit, text=f", claimed above {number(limit)}"), name)


def close(
    ours: float | BySeed, expected: float, tolerance: float, *, name: str = "", seeds: int | None = None
) -> Finding:
    """Judge whether every value equals an expected value, within a relative tolerance (absolute if 0 is expected).

    Use this check for a formula, not for a mean, because one value outside the tolerance makes the claim fail.
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
    """Judge whether values rise (or fall) with x, by Kendall's tau and a slope.

    The claim holds if the seeds' mean tau is at least ``at_least`` in the claimed direction. In addition, a one-sided t
    test at 2.5 % must show a slope in this direction, over the rank of x. If both conditions are met in the other
    direction, the claim is reversed. Lamina uses the seeds that have a finite value at every x.
    """
    xs = sorted(values)
    seeds = sorted(set.intersection(*({s for s, v in values[x].items() if math.isfinite(v)} for x in xs)))
    places = ", ".join(f"{x:g}" for x in xs)
    course = ", ".join(number(mean([values[x][seed] for seed in seeds])) if seeds else "-" for x in xs)
    text = f"{name} {course} at {places}".strip()
    if len(seeds) < TOO_FEW:
        return inconclusive(text, f"fewer than {TOO_FEW} seeds have a value at each of {places}", len(seeds))
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
    """Judge by Kendall's tau whether two quantities rank the configurations in the same order.

    The claim holds if a test at 2.5 % shows that tau is at least ``at_least``. The claim is reversed if the test shows
    a smaller tau. The ranking uses the configurations' means. A configuration without values ranks last.
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
    """Judge whether at least a fraction of the flags is true, without a statistical test.

    Each flag is a case, such as a layer, a pair or a step. With fewer than 3 flags, the verdict is inconclusive.
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
