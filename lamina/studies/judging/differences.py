"""The decision that all checks of a difference share, and the words for its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lamina.studies.judging.findings import TOO_FEW, Finding, Verdict
from lamina.studies.judging.statistics import ALPHA, equivalence_test, paired, t_test

BySeed = Mapping[int, float]


def lower_in_pairs(a: BySeed, b: BySeed, *, names: tuple[str, str], by: float, higher: bool = False) -> Finding:
    """Whether a is below b (``higher``: above it), from the differences a - b over the seeds that both have.

    Holds if the differences' 95 % interval lies on the claimed side of 0 and the paired t test's p is below .05.
    Fails if a difference of ``by`` to the claimed side is excluded, by the interval and by a one-sided t test. Else,
    and with fewer than 3 pairs, inconclusive.
    """
    seeds, differences = _differences(a, b)
    if len(seeds) < TOO_FEW:
        return _too_few(names, a, b, len(seeds))
    found = paired(differences)
    sign = -1.0 if higher else 1.0
    low, high = sorted((sign * found.interval[0], sign * found.interval[1]))
    signed = [sign * each for each in differences]
    if high < 0 and found.p < ALPHA:
        verdict = Verdict.HOLDS
    elif low > -by and t_test(signed, mean=-by, alternative="greater") < ALPHA:
        verdict = Verdict.FAILS
    else:
        verdict = Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=_compared(names, [a[seed] for seed in seeds], [b[seed] for seed in seeds])
        + f": difference {measured(found.mean, found.interval, len(seeds), found.p)}",
        margin=found.mean,
        interval=found.interval,
        p=found.p,
        seeds=len(seeds),
        note="" if _agree(found.p, found.p_wilcoxon, len(seeds)) else f"Wilcoxon's test: {p_text(found.p_wilcoxon)}",
    )


def equivalent_in_pairs(a: BySeed, b: BySeed, *, names: tuple[str, str], within: float) -> Finding:
    """Whether a and b differ by less than ``within``: two one-sided tests (TOST) on the pairs.

    Fails if the difference is larger by the same two tests' measure: its interval lies outside, and a one-sided t
    test excludes the nearer bound.
    """
    seeds, differences = _differences(a, b)
    if len(seeds) < TOO_FEW:
        return _too_few(names, a, b, len(seeds))
    found = paired(differences)
    p = equivalence_test(differences, within)
    outside = min(found.interval) > within or max(found.interval) < -within
    sign = math.copysign(1.0, found.mean)
    larger = t_test([sign * each for each in differences], mean=within, alternative="greater")
    if p < ALPHA and max(map(abs, found.interval)) < within:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS if outside and larger < ALPHA else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=_compared(names, [a[seed] for seed in seeds], [b[seed] for seed in seeds])
        + f": difference {measured(found.mean, found.interval, len(seeds), p)}, claimed within {number(within)}",
        margin=found.mean,
        interval=found.interval,
        p=p,
        seeds=len(seeds),
    )


def not_above_in_pairs(a: BySeed, b: BySeed, *, names: tuple[str, str], within: float) -> Finding:
    """Whether a is at most ``within`` above b: a one-sided t test on the pairs, and the interval below ``within``.

    Fails if the interval lies above ``within``, and the test to the other side says so, too.
    """
    seeds, differences = _differences(a, b)
    if len(seeds) < TOO_FEW:
        return _too_few(names, a, b, len(seeds))
    found = paired(differences)
    p = t_test(differences, mean=within, alternative="less")
    if p < ALPHA and found.interval[1] < within:
        verdict = Verdict.HOLDS
    else:
        above = t_test(differences, mean=within, alternative="greater") < ALPHA and found.interval[0] > within
        verdict = Verdict.FAILS if above else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=_compared(names, [a[seed] for seed in seeds], [b[seed] for seed in seeds])
        + f": difference {measured(found.mean, found.interval, len(seeds), p)}, claimed at most {number(within)}",
        margin=found.mean,
        interval=found.interval,
        p=p,
        seeds=len(seeds),
    )


def too_few(names: tuple[str, str], pairs: int) -> Finding:
    """The finding of a comparison without enough pairs."""
    return Finding(
        verdict=Verdict.INCONCLUSIVE,
        ours=f"{names[0]} vs {names[1]}: {seeds_text(pairs)} in common",
        seeds=pairs,
        note=f"fewer than {TOO_FEW} pairs of seeds",
    )


def _too_few(names: tuple[str, str], a: BySeed, b: BySeed, pairs: int) -> Finding:
    """The same, with the arm that has no value: none of its runs trained, or most ended before they had learned."""
    empty = [name.rpartition(": ")[2] for name, values in zip(names, (a, b), strict=True) if not values]
    found = too_few(names, pairs)
    return found.noted(f"no run that has learned: {', '.join(empty)}") if empty else found


def number(value: float) -> str:
    """A number as the verdicts print it: four digits."""
    return f"{value:.4g}"


def measured(value: float, interval: Sequence[float], seeds: int, p: float) -> str:
    """A number with what it rests on: ``-0.013 (95 % -0.016 to -0.010, 5 seeds, p 0.001)``."""
    low, high = (f"{end:.3g}" for end in interval)
    return f"{value:.3g} (95 % {low} to {high}, {seeds_text(seeds)}, {p_text(p)})"


def p_text(p: float) -> str:
    """A p value: ``p 0.012``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def seeds_text(count: int) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{count} seed" + ("" if count == 1 else "s")


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return math.fsum(values) / len(values)


def _compared(names: tuple[str, str], a: Sequence[float], b: Sequence[float]) -> str:
    return f"{names[0]} {number(mean(a))} vs {names[1]} {number(mean(b))}".strip()


def _differences(a: BySeed, b: BySeed) -> tuple[list[int], list[float]]:
    seeds = [seed for seed in sorted(set(a) & set(b)) if math.isfinite(a[seed]) and math.isfinite(b[seed])]
    return seeds, [float(a[seed]) - float(b[seed]) for seed in seeds]


def _agree(p: float, p_wilcoxon: float, pairs: int) -> bool:
    """Whether the two tests agree, where Wilcoxon's can be significant at all: from 6 pairs on."""
    return pairs < 6 or (p < ALPHA) == (p_wilcoxon < ALPHA)
