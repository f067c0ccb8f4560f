"""The decision that all checks of a mean share, and the words for its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.papers.judging.findings import TOO_FEW, Finding, Verdict
from lamina.papers.judging.statistics import ALPHA, p_above, t_interval

BySeed = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a claim says that a mean lies: below a bound, above one, or between two.

    Attributes:
        below, above: the bounds.
        least: the smallest distance beyond the bound that counts.
        text: the claim in words, behind the numbers.
    """

    below: float = math.inf
    above: float = -math.inf
    least: float = 0.0
    text: str = ""

    def find(self, values: Sequence[float], *, name: str) -> Finding:
        """The finding on the mean of at least three values, one per seed; an infinite one is of a run that failed.

        Holds if a one-sided test at 2.5 % shows the mean inside each bound, and it lies inside by ``least``. Fails by
        tests at the same level: `reversed` if the mean is shown to lie outside in the same way, `excluded` if it is
        shown not to lie inside by ``least``. All p values are doubled. With an infinite value, Wilcoxon's signed ranks
        and the median take the place of the t test and the mean.
        """
        known, center, slack = all(map(math.isfinite, values)), _center(values), 1e-9
        # Each side turned and shifted so that the claim is: below 0.
        sides = [(1.0, self.below)] if math.isfinite(self.below) else []
        sides += [(-1.0, self.above)] if math.isfinite(self.above) else []
        turned = [[sign * (value - bound) for value in values] for sign, bound in sides]
        centers = [sign * (center - bound) for sign, bound in sides]
        p = max(p_above([-value for value in side]) for side in turned)
        reverse = min(p_above(side) for side in turned)
        exclude = min(p_above([value + self.least for value in side]) for side in turned)
        verdict, p_not = Verdict.INCONCLUSIVE, exclude
        if p < ALPHA and max(centers) <= slack - self.least:
            verdict = Verdict.HOLDS
        elif reverse < ALPHA and max(centers) >= self.least - slack:
            verdict, p_not = Verdict.REVERSED, reverse
        elif exclude < ALPHA:
            verdict = Verdict.EXCLUDED
        interval = t_interval(values) if known else None
        shown = p_not if verdict.failed else p
        return Finding(
            verdict=verdict,
            ours=f"{name} {measured(center, interval, len(values), shown)}{self.text}".strip(),
            margin=center,
            interval=interval,
            p=p,
            p_not=p_not,
            seeds=len(values),
        )


def pairs_in(region: Region, a: BySeed, b: BySeed, *, names: tuple[str, str]) -> Finding:
    """The finding on the differences a - b over the seeds that both have.

    An infinite value is of a run that did not train: the difference is infinite, and where both have one, the pair says
    nothing. Too few pairs are inconclusive.
    """
    seeds = [seed for seed in sorted(a.keys() & b.keys()) if not (math.isnan(a[seed]) or math.isnan(b[seed]))]
    seeds = [seed for seed in seeds if a[seed] != b[seed] or math.isfinite(a[seed])]
    if len(seeds) < TOO_FEW:
        return too_few(names, a, b, len(seeds))
    differences = [float(a[seed]) - float(b[seed]) for seed in seeds]
    if all(map(math.isfinite, differences)):
        means = (number(mean([side[seed] for seed in seeds])) for side in (a, b))
        return region.find(differences, name=f"{names[0]} {next(means)} vs {names[1]} {next(means)}: difference")
    won = sum(difference < 0 for difference in differences)
    name = f"{names[0]} vs {names[1]}, runs that failed last: lower in {won} of {len(seeds)} pairs, median difference"
    return region.find(differences, name=name)


def too_few(names: tuple[str, str], a: BySeed, b: BySeed, pairs: int) -> Finding:
    """The finding of a comparison without enough pairs, with the arms that have no value."""
    empty = [name.rpartition(": ")[2] for name, values in zip(names, (a, b), strict=True) if not values]
    found = Finding(
        verdict=Verdict.INCONCLUSIVE,
        ours=f"{names[0]} vs {names[1]}: {seeds_text(pairs)} in common",
        seeds=pairs,
        note=f"fewer than {TOO_FEW} pairs of seeds",
    )
    return found.noted(f"no run that has learned: {', '.join(empty)}") if empty else found


def number(value: float) -> str:
    """A number as the verdicts print it: four digits."""
    return f"{value:.4g}"


def measured(value: float, interval: Sequence[float] | None, seeds: int, p: float) -> str:
    """A number with what it rests on: ``-0.013 (95 % -0.016 to -0.010, 5 seeds, p 0.001)``."""
    within = "" if interval is None else f"95 % {interval[0]:.3g} to {interval[1]:.3g}, "
    return f"{value:.3g} ({within}{seeds_text(seeds)}, {p_text(p)})"


def p_text(p: float) -> str:
    """A p value: ``p 0.012``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def seeds_text(count: int) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{count} seed" + ("" if count == 1 else "s")


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return math.fsum(values) / len(values)


def _center(values: Sequence[float]) -> float:
    """The mean; the median where a value is infinite."""
    if all(map(math.isfinite, values)):
        return mean(values)
    low, high = statistics.median_low(values), statistics.median_high(values)
    return (low + high) / 2 if low != -high or math.isfinite(low) else 0.0
