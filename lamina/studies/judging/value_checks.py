"""Checks of numbers by seed, from a probe's table or anywhere: against each other, a bound, a formula, an order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lamina.studies.judging.differences import (
    BySeed,
    equivalent_in_pairs,
    lower_in_pairs,
    mean,
    measured,
    number,
    p_text,
    seeds_text,
)
from lamina.studies.judging.findings import TOO_FEW, Finding, Verdict
from lamina.studies.judging.statistics import ALPHA, bootstrap_interval, kendall, t_test

_SEED, _RESAMPLES = 20261123, 999  # of the bootstrap of a tau


def compare_values(
    a: BySeed, b: BySeed, *, lower: bool = True, by: float = 0.0, names: tuple[str, str] = ("a", "b")
) -> Finding:
    """Whether a lies below b (``lower=False``: above it), paired over the seeds that both have.

    It fails if a difference of ``by`` to the claimed side is excluded; with the default, if the reverse is shown.
    """
    return lower_in_pairs(a, b, names=names, by=by, higher=not lower)


def equivalent_values(a: BySeed, b: BySeed, *, within: float, names: tuple[str, str] = ("a", "b")) -> Finding:
    """Whether a and b, paired over the seeds, differ by less than ``within`` (two one-sided tests)."""
    return equivalent_in_pairs(a, b, names=names, within=within)


def below(values: BySeed, limit: float, *, name: str = "") -> Finding:
    """Whether the values' mean lies below a limit: one-sided in both directions, at 2.5 % each."""
    return _bounded(values, limit, name=name, sign=1.0)


def above(values: BySeed, limit: float, *, name: str = "") -> Finding:
    """Whether the values' mean lies above a limit."""
    return _bounded(values, limit, name=name, sign=-1.0)


def close(
    ours: float | BySeed, expected: float, tolerance: float, *, name: str = "", seeds: int | None = None
) -> Finding:
    """Whether every number is within ``tolerance`` of an exact value, relative to it (absolute where it is 0).

    For a formula, not for a mean: one number that misses it makes the claim fail. ``seeds``: how many there are, where
    the numbers are not one per seed.
    """
    values = list(ours.values()) if isinstance(ours, Mapping) else [float(ours)]
    scale = abs(expected) or 1.0
    worst = max(
        (abs(value - expected) / scale for value in values), key=lambda miss: math.inf if miss != miss else miss
    )
    return Finding(
        verdict=Verdict.HOLDS if worst <= tolerance else Verdict.FAILS,
        ours=f"{name} {number(mean(values))} against {number(expected)}: off by at most {100 * worst:.2g} %".strip(),
        margin=worst,
        seeds=len(values) if seeds is None else seeds,
    )


def monotone(values: Mapping[float, BySeed], *, rising: bool = True, name: str = "", at_least: float = 0.6) -> Finding:
    """Whether values by seed rise (or fall) with x, where ``values`` maps each x to them.

    Holds if Kendall's tau between x and value, averaged over the seeds, is at least ``at_least`` in the claimed
    direction, and a t test over the seeds of the slope (of value over the rank of x) has p below .05. Fails if mean tau
    and slope are in the other direction, and a one-sided t test of the slope says so. Seeds that lack an x, or a finite
    value there, are left out.
    """
    xs = sorted(values)
    seeds = sorted(set.intersection(*({s for s, v in values[x].items() if math.isfinite(v)} for x in xs)))
    places = ", ".join(f"{x:g}" for x in xs)
    course = ", ".join(number(mean([values[x][seed] for seed in seeds])) if seeds else "-" for x in xs)
    text = f"{name} {course} at {places}".strip()
    if len(seeds) < TOO_FEW:
        note = f"fewer than {TOO_FEW} seeds with all of {places}"
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=text, seeds=len(seeds), note=note)
    sign = 1 if rising else -1
    tau = mean([kendall(xs, [sign * values[x][seed] for x in xs])[0] for seed in seeds])
    slopes = [_slope([sign * values[x][seed] for x in xs]) for seed in seeds]
    p = t_test(slopes)
    if tau >= at_least and mean(slopes) > 0 and p < ALPHA:
        verdict = Verdict.HOLDS
    else:
        reverse = tau < 0 and t_test(slopes, alternative="less") < ALPHA
        verdict = Verdict.FAILS if reverse else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=f"{text}: {'rising' if rising else 'falling'} with tau {tau:.2f} ({seeds_text(len(seeds))}, {p_text(p)})",
        margin=tau,
        p=p,
        seeds=len(seeds),
    )


def same_order(a: Mapping[str, BySeed], b: Mapping[str, BySeed], *, at_least: float = 0.6, name: str = "") -> Finding:
    """Whether two mappings of arm to values by seed rank their arms alike: Kendall's tau of the means.

    Holds if tau is at least ``at_least``, with p < .05. Fails if tau's 95 % interval lies below ``at_least``: a
    bootstrap over the seeds of each mapping, the same ones in all arms. An arm without a value ranks last.
    """
    arms = sorted(a.keys() & b.keys())
    seeds = min(len(set().union(*one.values())) for one in (a, b))
    if len(arms) < TOO_FEW or seeds < TOO_FEW:
        few = f"fewer than {TOO_FEW} arms" if len(arms) < TOO_FEW else f"fewer than {TOO_FEW} seeds"
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=f"{name} {len(arms)} arms".strip(), note=few, seeds=seeds)
    tau, p = kendall(*([_center(one[arm].values()) for arm in arms] for one in (a, b)))
    low, high = _interval_of_tau(*([one[arm] for arm in arms] for one in (a, b)))
    if tau >= at_least and p < ALPHA:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS if high < at_least else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=f"{name} Kendall's tau {tau:.2f} over {len(arms)} arms (95 % {low:.2f} to {high:.2f}, "
        f"{seeds_text(seeds)}, {p_text(p)})".strip(),
        margin=tau,
        interval=(low, high),
        p=p,
        seeds=seeds,
    )


def fraction(flags: Iterable[bool], *, at_least: float, name: str = "", seeds: int = 0) -> Finding:
    """Whether a share of cases (layers, pairs, steps) is at least ``at_least``; a count, without a test.

    Without a case, inconclusive.
    """
    cases = [bool(flag) for flag in flags]
    if not cases:
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=f"{name} no case".strip(), note="nothing to count")
    share = sum(cases) / len(cases)
    return Finding(
        verdict=Verdict.HOLDS if share >= at_least else Verdict.FAILS,
        ours=f"{name} {sum(cases)} of {len(cases)} (claimed: at least {at_least:.0%})".strip(),
        margin=share,
        seeds=seeds,
    )


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line through values at 0, 1, 2, ..."""
    center = (len(values) - 1) / 2
    return sum((x - center) * value for x, value in enumerate(values)) / sum(
        (x - center) ** 2 for x in range(len(values))
    )


def _bounded(values: BySeed, limit: float, *, name: str, sign: float) -> Finding:
    numbers = [float(value) for value in values.values() if math.isfinite(value)]
    sides = "below" if sign > 0 else "above"
    if len(numbers) < TOO_FEW:
        return Finding(
            verdict=Verdict.INCONCLUSIVE,
            ours=f"{name} {', '.join(map(number, numbers)) or 'no value'}, claimed {sides} {number(limit)}".strip(),
            seeds=len(numbers),
            note=f"fewer than {TOO_FEW} seeds",
        )
    interval = bootstrap_interval(numbers)
    p = t_test(numbers, mean=limit)
    nearest, farthest = sorted((sign * interval[0], sign * interval[1]), reverse=True)
    if nearest < sign * limit and p < ALPHA:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS if farthest > sign * limit and p < ALPHA else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=f"{name} {measured(mean(numbers), interval, len(numbers), p)}, claimed {sides} {number(limit)}".strip(),
        margin=mean(numbers) - limit,
        interval=(interval[0] - limit, interval[1] - limit),
        p=p,
        seeds=len(numbers),
    )


def _center(values: Iterable[float]) -> float:
    """The mean; infinite without a value."""
    known = list(values)
    return mean(known) if known else math.inf


def _interval_of_tau(a: Sequence[BySeed], b: Sequence[BySeed]) -> tuple[float, float]:
    """The 95 % bootstrap interval of Kendall's tau between the arms' means."""
    import numpy as np

    draws = np.random.default_rng(_SEED)
    taus = []
    for _ in range(_RESAMPLES):
        means = []
        for arms in (a, b):
            seeds = sorted(set().union(*arms))
            drawn = [seeds[place] for place in draws.integers(len(seeds), size=len(seeds))]
            means.append([_center(arm[seed] for seed in drawn if seed in arm) for arm in arms])
        taus.append(kendall(*means)[0])
    low, high = np.quantile(taus, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)
