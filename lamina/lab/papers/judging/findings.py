"""Define a finding (a verdict on a claim, and the numbers behind it), and combine findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lamina.core.intervals import ALPHA, t_interval
from lamina.lab.papers.judging.statistics import p_above

MOST, FEW = 2 / 3, 1 / 3  # fractions of the seeds
TOO_FEW = 3  # with fewer pairs of seeds, Lamina does not judge a difference


class Verdict(StrEnum):
    """The verdict on a claim.

    Attributes:
        HOLDS: the runs show that the claim is true.
        HOLDS_AT_ISO_LOSS: the runs show that the claim is true, also at equal pretraining loss.
        EXPLAINED: the runs show that the claim is true, but a lower pretraining loss explains the effect.
        REVERSED: the runs show the opposite.
        EXCLUDED: the runs show that any difference is too small to count.
        PART_FAILED: the runs show that a part of the claim is false.
        FAILS: a count or a formula contradicts the claim, or the runs show a difference that the claim denies.
        INCONCLUSIVE: the seeds vary too much, or are too few, to tell.
        NEEDS_SCALE: models of this size cannot decide the claim. The note gives the reason.
        NOT_RUN: not all runs have finished.
    """

    HOLDS = "holds"
    HOLDS_AT_ISO_LOSS = "holds at iso-loss"
    EXPLAINED = "explained by loss"
    REVERSED = "reversed"
    EXCLUDED = "excluded"
    PART_FAILED = "a part failed"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"
    NEEDS_SCALE = "needs scale"
    NOT_RUN = "not run yet"

    @property
    def decided(self) -> bool:
        """Whether the verdict is for or against the claim."""
        return self.shown or self.failed

    @property
    def shown(self) -> bool:
        """Whether the runs show the claimed effect, even if a lower loss explains the effect."""
        return self in (Verdict.HOLDS, Verdict.HOLDS_AT_ISO_LOSS, Verdict.EXPLAINED)

    @property
    def failed(self) -> bool:
        """Whether the runs show that the claim is false."""
        return self in FAILED


FAILED = (Verdict.REVERSED, Verdict.EXCLUDED, Verdict.PART_FAILED, Verdict.FAILS)
IN_WORDS: dict[str, str] = {
    Verdict.HOLDS: "supported",
    Verdict.HOLDS_AT_ISO_LOSS: "supported, also at equal loss",
    Verdict.EXPLAINED: "explained by a lower loss",
    Verdict.REVERSED: "opposite",
    Verdict.EXCLUDED: "not supported",
    Verdict.FAILS: "not supported",
    Verdict.PART_FAILED: "a part is not supported",
    Verdict.INCONCLUSIVE: "cannot tell",
    Verdict.NEEDS_SCALE: "cannot tell at this size",
    Verdict.NOT_RUN: "not run yet",
}
"""The words for each verdict on report pages, in the pages' order."""


def in_words(text: object) -> str:
    """Translate the verdict at the start of a text for report pages, such as "holds: ..." to "supported: ..."."""
    verdict, colon, rest = str(text).partition(": ")
    return f"{IN_WORDS.get(verdict, verdict)}{colon}{rest}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict, and the numbers behind the verdict.

    Attributes:
        verdict: the verdict before the correction for the numbers of claims and judgments.
        ours: the numbers in one line of text.
        parts: the text lines of all combined findings. The deciding finding comes first.
        margin: the judged difference or value, in the column's unit.
        interval: the 95 % interval of ``margin``.
        p: twice the one-sided p value for the claim, or None without a test.
        p_not: twice the one-sided p value against the claim, or None without a test.
        seeds: the number of judged seeds.
        note: remarks for the reader, such as failed runs.
    """

    verdict: Verdict
    ours: str
    margin: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    p_not: float | None = None
    seeds: int = 0
    note: str = ""
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", (self.ours,))

    @property
    def lines(self) -> tuple[str, ...]:
        """The text lines of this finding in a combined finding. Each line begins with a verdict."""
        linked = len(self.parts) > 1 or self.ours.startswith(f"{self.verdict}: ")
        return self.parts if linked else (f"{self.verdict}: {self.ours}",)

    def noted(self, note: str) -> Finding:
        return replace(self, note="; ".join(filter(None, [self.note, note])))

    def undecided(self, note: str) -> Finding:
        """Return the finding with an inconclusive verdict, and add the reason."""
        return replace(self, verdict=Verdict.INCONCLUSIVE).noted(note)


def inconclusive(ours: str, note: str, seeds: int = 0) -> Finding:
    return Finding(verdict=Verdict.INCONCLUSIVE, ours=ours.strip(), note=note, seeds=seeds)


def needs_scale(scale: str, why: str) -> Finding:
    """Return the finding for a claim that needs a larger scale ("gpu" or "paper"), with the reason ``why``."""
    return Finding(verdict=Verdict.NEEDS_SCALE, ours="not measured", note=f"this claim needs scale {scale}: {why}")


def all_of(*findings: Finding) -> Finding:
    """Combine findings by "and": the claim holds if all findings hold, and fails if one finding fails.

    The p value for the claim is the findings' largest p value (an intersection-union test). The p value against the
    claim is the smallest p value against a finding, times the number of tests (Bonferroni). If a finding fails before
    this correction but not after this correction, the result is inconclusive. Margin and interval come from the finding
    that decides the result.
    """
    p, p_not = _largest([each.p for each in findings]), _smallest([each.p_not for each in findings])
    failed = [each for each in findings if each.verdict.failed]
    if failed:
        if len({each.verdict for each in findings}) == 1:  # all verdicts are equal
            p_not = _largest([each.p_not for each in findings])
            return _joined(findings, failed[0], failed[0].verdict, p, p_not)
        by_count = any(each.p_not is None for each in failed)
        if by_count or p_not is None or p_not < ALPHA:
            first = min(failed, key=lambda each: each.p_not or 0.0)
            return _joined(findings, first, Verdict.PART_FAILED, p, None if by_count else p_not)
        return _joined(findings, failed[0], Verdict.INCONCLUSIVE, p, p_not)
    for verdict in (Verdict.NOT_RUN, Verdict.NEEDS_SCALE, Verdict.INCONCLUSIVE, Verdict.EXPLAINED):
        deciding = [each for each in findings if each.verdict == verdict]
        if deciding:
            return _joined(findings, deciding[0], verdict, p, p_not)
    holding = [each for each in findings if each.verdict == Verdict.HOLDS] or list(findings)
    weakest = max(holding, key=lambda each: -1.0 if each.p is None else each.p)
    return _joined(findings, weakest, weakest.verdict, p, p_not)


def any_of(*findings: Finding) -> Finding:
    """Combine findings by "or": the claim holds if one finding holds, and fails if all findings fail.

    The p value for the claim is the smallest p value for a finding, times the number of tests. The p value against the
    claim is the largest p value against a finding.
    """
    p, p_not = _smallest([each.p for each in findings]), _largest([each.p_not for each in findings])
    shown = (Verdict.HOLDS_AT_ISO_LOSS, Verdict.HOLDS, Verdict.EXPLAINED)
    for verdict in (*shown, Verdict.INCONCLUSIVE, Verdict.NEEDS_SCALE, Verdict.NOT_RUN):
        deciding = [each for each in findings if each.verdict == verdict]
        if deciding:
            best = min(deciding, key=lambda each: 0.0 if each.p is None else each.p)
            tested = sum(each.p is not None for each in findings)
            corrected = None if best.p is None else min(1.0, best.p * tested)
            if verdict in shown and corrected is not None and corrected >= ALPHA:
                return _joined(findings, best, Verdict.INCONCLUSIVE, corrected, p_not)
            return _joined((best,) if verdict in shown else findings, best, verdict, corrected, p_not)
    kinds = {each.verdict for each in findings}
    return _joined(findings, findings[0], findings[0].verdict if len(kinds) == 1 else Verdict.FAILS, p, p_not)


def denied(finding: Finding) -> Finding:
    """Negate a finding: `holds` becomes `reversed`, and a verdict against the claim becomes `holds`."""
    verdict = finding.verdict
    if verdict.decided:
        verdict = Verdict.REVERSED if verdict.shown else Verdict.HOLDS
    return replace(finding, verdict=verdict, p=finding.p_not, p_not=finding.p)


def _largest(ps: Sequence[float | None]) -> float | None:
    return max((p for p in ps if p is not None), default=None)


def _smallest(ps: Sequence[float | None]) -> float | None:
    """Return the smallest p value times the number of p values (Bonferroni)."""
    tested = [p for p in ps if p is not None]
    return min(1.0, min(tested) * len(tested)) if tested else None


def _joined(
    findings: Sequence[Finding], deciding: Finding, verdict: Verdict, p: float | None, p_not: float | None
) -> Finding:
    notes = dict.fromkeys(note for finding in findings for note in finding.note.split("; ") if note)
    several = len(findings) > 1
    lines = (finding.lines if several else finding.parts for finding in (deciding, *findings))
    parts = tuple(dict.fromkeys(line for each in lines for line in each))
    return replace(
        deciding,
        verdict=verdict,
        ours="; ".join(parts),
        parts=parts,
        p=p,
        p_not=p_not,
        seeds=min((finding.seeds for finding in findings if finding.seeds), default=0),
        note="; ".join(notes),
    )


BySeed = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Region:
    """The claimed range of a mean: below a limit, above a limit, or between two limits.

    Attributes:
        least: the smallest distance between the mean and the limit that can decide the claim.
        text: the words for the claimed range, at the end of the verdict's text.
    """

    below: float = math.inf
    above: float = -math.inf
    least: float = 0.0
    text: str = ""

    def find(self, values: Sequence[float], *, name: str) -> Finding:
        """Judge the mean of at least three values, one per seed. An infinite value marks a failed run.

        One-sided tests at 2.5 % must show that the mean is above (or below) a limit. The mean must also be at least
        ``least`` away from the limit. The claim holds if the mean is on the claimed side of every limit. If the mean is
        on the wrong side of a limit, the verdict is `reversed`, or `fails` with two limits. The verdict is `excluded`
        if a test shows that the mean is less than ``least`` beyond the limit on the claimed side. If a value is
        infinite, Lamina uses Wilcoxon's signed-rank test and the median instead of the t test and the mean.
        """
        finite, slack = all(map(math.isfinite, values)), 1e-9
        low, high = statistics.median_low(values), statistics.median_high(values)
        median = (low + high) / 2 if low != -high or math.isfinite(low) else 0.0
        center = mean(values) if finite else median
        # Flip and shift the values for each limit, so that the claim becomes: below 0.
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
            verdict, p_not = Verdict.REVERSED if len(sides) == 1 else Verdict.FAILS, reverse
        elif exclude < ALPHA:
            verdict = Verdict.EXCLUDED
        interval = t_interval(values) if finite else None
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
    """Judge the differences between two configurations at their common seeds.

    An infinite value marks a failed run. If both runs of a seed failed, Lamina leaves out the seed. With fewer than 3
    seeds, the finding is inconclusive.
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
    name = f"{names[0]} vs {names[1]}, failed runs ranked last: lower in {won} of {len(seeds)} pairs, median difference"
    return region.find(differences, name=name)


def too_few(names: tuple[str, str], a: BySeed, b: BySeed, pairs: int) -> Finding:
    """Return an inconclusive finding for too few pairs of seeds. The note names configurations that have no values."""
    empty = [name.rpartition(": ")[2] for name, values in zip(names, (a, b), strict=True) if not values]
    ours, note = f"{names[0]} vs {names[1]}: {seeds_text(pairs)} in common", f"fewer than {TOO_FEW} pairs of seeds"
    return inconclusive(ours, f"{note}; no run has learned: {', '.join(empty)}" if empty else note, pairs)


def number(value: float) -> str:
    return f"{value:.4g}"


def measured(value: float, interval: Sequence[float] | None, seeds: int, p: float) -> str:
    within = "" if interval is None else f"95 % {interval[0]:.3g} to {interval[1]:.3g}, "
    return f"{value:.3g} ({within}{seeds_text(seeds)}, {p_text(p)})"


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def seeds_text(count: int) -> str:
    return f"{count} seed" + ("" if count == 1 else "s")


mean = statistics.fmean
