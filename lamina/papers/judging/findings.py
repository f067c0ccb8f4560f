"""What a claim's check found: a verdict with its numbers, and how several findings make one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lamina.papers.judging.statistics import ALPHA

MOST, FEW = 2 / 3, 1 / 3  # shares of the seeds
TOO_FEW = 3  # pairs of seeds below which a difference is not judged


class Verdict(StrEnum):
    """What became of a claim.

    Attributes:
        HOLDS: the trials show it.
        HOLDS_AT_ISO_LOSS: they show it at equal loss of pretraining, too.
        EXPLAINED: they show it, and at equal loss of pretraining it is gone.
        REVERSED: they show the opposite.
        EXCLUDED: they exclude a difference as large as the smallest that counts.
        PART_FAILED: they show that a part of it is false.
        FAILS: a count or a formula contradicts it.
        INCONCLUSIVE: inside the seeds' spread.
        NEEDS_SCALE: this scale cannot decide it; the note says why.
        NOT_RUN: its trials have not been trained, or not all of them.
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
        """Whether it is an answer."""
        return self.shown or self.failed

    @property
    def shown(self) -> bool:
        """Whether the trials show what the claim says, for whatever reason."""
        return self in (Verdict.HOLDS, Verdict.HOLDS_AT_ISO_LOSS, Verdict.EXPLAINED)

    @property
    def failed(self) -> bool:
        """Whether the trials show that the claim is false."""
        return self in FAILED


FAILED = (Verdict.REVERSED, Verdict.EXCLUDED, Verdict.PART_FAILED, Verdict.FAILS)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict and the numbers that it rests on.

    Attributes:
        verdict: what the check decided, before the correction for the study's claims and looks.
        ours: the numbers in one line.
        parts: the same, a line for each finding that this one is made of, with its own verdict; what decides first.
        margin: the difference that was judged, or a value, in the column's unit.
        interval: the margin's 95 % interval.
        p: of what the claim says, one-sided and doubled; None where the verdict rests on no test (an exact formula).
        p_not: of what contradicts it, in the same way.
        seeds: how many seeds the verdict rests on.
        note: what a reader must know beside the numbers: runs that failed, a rate at the sweep's edge.
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
        """The parts as links of a larger claim: each with its verdict."""
        linked = len(self.parts) > 1 or self.ours.startswith(f"{self.verdict}: ")
        return self.parts if linked else (f"{self.verdict}: {self.ours}",)

    def noted(self, note: str) -> Finding:
        """The same finding with one more note."""
        return replace(self, note="; ".join(filter(None, [self.note, note])))

    def undecided(self, note: str) -> Finding:
        """The same numbers without a verdict, and why."""
        return replace(self, verdict=Verdict.INCONCLUSIVE).noted(note)


def needs_scale(scale: str, why: str) -> Finding:
    """The finding of a claim that only a larger scale ("gpu", "paper") can decide; ``why`` in one sentence."""
    return Finding(verdict=Verdict.NEEDS_SCALE, ours="not measured", note=f"decided at scale {scale}: {why}")


def all_of(*findings: Finding) -> Finding:
    """The conjunction: holds if all hold, and fails if one fails.

    That all hold has the largest of the parts' p (an intersection-union test). That one is false has the smallest times
    the number of parts (Bonferroni): one that fails by its own p alone leaves the conjunction inconclusive. Margin and
    interval are those of the part that decides: the first that fails or is undecided, else the one of the largest p.
    """
    assert findings
    p, p_not = _largest([each.p for each in findings]), _smallest([each.p_not for each in findings])
    failed = [each for each in findings if each.verdict.failed]
    if failed:
        kinds = {each.verdict for each in findings}
        if len(kinds) == 1:  # all of them
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
    """The disjunction: holds if one holds, fails if all fail.

    That one holds has its p times the number of parts. That all fail has the largest of their p.
    """
    assert findings
    p, p_not = _smallest([each.p for each in findings]), _largest([each.p_not for each in findings])
    shown = (Verdict.HOLDS_AT_ISO_LOSS, Verdict.HOLDS, Verdict.EXPLAINED)
    for verdict in (*shown, Verdict.INCONCLUSIVE, Verdict.NEEDS_SCALE, Verdict.NOT_RUN):
        deciding = [each for each in findings if each.verdict == verdict]
        if deciding:
            best = min(deciding, key=lambda each: 0.0 if each.p is None else each.p)
            tested = sum(each.p is not None for each in findings)
            own = None if best.p is None else min(1.0, best.p * tested)
            if verdict in shown and own is not None and own >= ALPHA:
                return _joined(findings, best, Verdict.INCONCLUSIVE, own, p_not)
            return _joined((best,) if verdict in shown else findings, best, verdict, own, p_not)
    kinds = {each.verdict for each in findings}
    return _joined(findings, findings[0], findings[0].verdict if len(kinds) == 1 else Verdict.FAILS, p, p_not)


def denied(finding: Finding) -> Finding:
    """The opposite claim: what held is reversed, and what failed holds."""
    verdict = finding.verdict
    if verdict.decided:
        verdict = Verdict.REVERSED if verdict.shown else Verdict.HOLDS
    return replace(finding, verdict=verdict, p=finding.p_not, p_not=finding.p)


def _largest(ps: Sequence[float | None]) -> float | None:
    return max((p for p in ps if p is not None), default=None)


def _smallest(ps: Sequence[float | None]) -> float | None:
    """The smallest p times their number."""
    known = [p for p in ps if p is not None]
    return min(1.0, min(known) * len(known)) if known else None


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
