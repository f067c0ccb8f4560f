"""What a claim's check found: a verdict with its numbers, and how several findings make one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

MOST, FEW = 2 / 3, 1 / 3  # shares of the seeds
TOO_FEW = 3  # pairs of seeds below which a difference is not judged


class Verdict(StrEnum):
    """What became of a claim.

    Attributes:
        HOLDS: the trials show it.
        HOLDS_AT_ISO_LOSS: they show it at equal loss of pretraining, too.
        EXPLAINED: they show it, and at equal loss of pretraining it is gone.
        FAILS: the trials exclude it.
        INCONCLUSIVE: inside the seeds' spread.
        NEEDS_SCALE: this scale cannot decide it; the note says which can.
        NOT_RUN: its trials have not been trained.
    """

    HOLDS = "holds"
    HOLDS_AT_ISO_LOSS = "holds at iso-loss"
    EXPLAINED = "explained by loss"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"
    NEEDS_SCALE = "needs scale"
    NOT_RUN = "not run yet"

    @property
    def decided(self) -> bool:
        """Whether it is an answer."""
        return self.shown or self == Verdict.FAILS

    @property
    def shown(self) -> bool:
        """Whether the trials show what the claim says, for whatever reason."""
        return self in (Verdict.HOLDS, Verdict.HOLDS_AT_ISO_LOSS, Verdict.EXPLAINED)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict and the numbers that it rests on.

    Attributes:
        verdict: what the check decided, before Holm's correction over the study's claims.
        ours: the numbers in one line.
        parts: the same, a line for each finding that this one is made of; what decides comes first.
        margin: the difference that was judged, or by how much a value lies above the claimed one, in the column's unit.
        interval: the margin's 95 % interval.
        p: two-sided, of no difference; None where the verdict rests on no test (a count of runs, an exact formula).
        seeds: how many seeds the verdict rests on.
        note: what a reader must know beside the numbers: runs left out, a rate at the sweep's edge.
    """

    verdict: Verdict
    ours: str
    margin: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    seeds: int = 0
    note: str = ""
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", (self.ours,))

    def noted(self, note: str) -> Finding:
        """The same finding with one more note."""
        return replace(self, note="; ".join(filter(None, [self.note, note])))


def needs_scale(scale: str, why: str) -> Finding:
    """The finding of a claim that only a larger scale ("gpu", "paper") can decide; ``why`` in one sentence."""
    return Finding(verdict=Verdict.NEEDS_SCALE, ours="not measured", note=f"decided at scale {scale}: {why}")


def all_of(*findings: Finding) -> Finding:
    """The conjunction: fails if one fails, holds if all hold.

    Its p is the largest of the parts' p: all of them must be significant (an intersection-union test). Margin and
    interval are those of the part that decides: the first that fails or is undecided, else the one of the largest p.
    """
    assert findings
    undecided = (Verdict.NOT_RUN, Verdict.NEEDS_SCALE, Verdict.INCONCLUSIVE)
    for verdict in (Verdict.FAILS, *undecided, Verdict.EXPLAINED):
        deciding = [finding for finding in findings if finding.verdict == verdict]
        if deciding:
            return _joined(findings, deciding[0], _largest_p(findings))
    weakest = max(
        [finding for finding in findings if finding.verdict == Verdict.HOLDS] or findings,
        key=lambda finding: -1.0 if finding.p is None else finding.p,
    )
    return _joined(findings, weakest, _largest_p(findings))


def any_of(*findings: Finding) -> Finding:
    """The disjunction: holds if one holds, fails if all fail. Its p is the deciding part's times the number of parts.

    Where one holds, its numbers stand alone. Where all fail, the p is the smallest times their number.
    """
    assert findings
    ps = [finding.p for finding in findings if finding.p is not None]
    p = min(1.0, min(ps) * len(ps)) if ps else None
    shown = (Verdict.HOLDS_AT_ISO_LOSS, Verdict.HOLDS, Verdict.EXPLAINED)
    for verdict in (*shown, Verdict.INCONCLUSIVE, Verdict.NEEDS_SCALE, Verdict.NOT_RUN):
        deciding = [finding for finding in findings if finding.verdict == verdict]
        if deciding:
            best = min(deciding, key=lambda finding: 0.0 if finding.p is None else finding.p)
            parts = (best,) if verdict in shown else findings
            return _joined(parts, best, None if best.p is None else min(1.0, best.p * len(ps)))
    return _joined(findings, findings[0], p)


def denied(finding: Finding) -> Finding:
    """The opposite claim: what held fails, and what failed holds. Without a p, which was that of the claim denied."""
    opposite = Verdict.FAILS if finding.verdict.shown else Verdict.HOLDS
    return replace(finding, verdict=opposite if finding.verdict.decided else finding.verdict, p=None)


def _largest_p(findings: tuple[Finding, ...]) -> float | None:
    return max((finding.p for finding in findings if finding.p is not None), default=None)


def _joined(findings: tuple[Finding, ...], deciding: Finding, p: float | None) -> Finding:
    notes = dict.fromkeys(note for finding in findings for note in finding.note.split("; ") if note)
    parts = tuple(dict.fromkeys(part for finding in (deciding, *findings) for part in finding.parts))
    return replace(
        deciding,
        ours="; ".join(parts),
        parts=parts,
        p=p,
        seeds=min((finding.seeds for finding in findings if finding.seeds), default=0),
        note="; ".join(notes),
    )
