"""Checks of arms against each other: their losses, or any other column, paired over the seeds.

A run that diverged, or that got stuck near the unigram entropy, has no loss to compare. It is left out of the means and
counted in the note; an arm of which most runs ended so is worse than any arm that trains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.core.frames import Frame
from lamina.jobs.status import Status
from lamina.studies.judging.differences import (
    equivalent_in_pairs,
    lower_in_pairs,
    not_above_in_pairs,
    number,
    seeds_text,
    too_few,
)
from lamina.studies.judging.findings import FEW, MOST, TOO_FEW, Finding, Verdict, all_of
from lamina.studies.judging.statistics import Optimum, parabola_optimum
from lamina.studies.judging.trials import Arm, Trials, label

TRAINED = (Status.FINISHED.value, Status.SHORT.value)
NOT_TRAINED = (Status.DIVERGED.value, Status.STUCK.value)


@dataclass(frozen=True)
class _Arm:
    """One arm's values of a column: those of the runs that trained, and how the others ended."""

    name: str
    values: dict[int, float]
    lost: dict[str, int]  # status -> runs that show that the arm does not train
    broken: int  # runs that say nothing: an error, an interruption
    short: int = 0  # runs whose value counts although they ended before they had learned

    @property
    def runs(self) -> int:
        return len(self.values) + sum(self.lost.values())

    @property
    def mean(self) -> float:
        return sum(self.values.values()) / len(self.values)

    @property
    def lost_share(self) -> float:
        return sum(self.lost.values()) / self.runs if self.runs else 0.0

    def note(self) -> str:
        parts = [f"{count} of {self.runs} {status}" for status, count in self.lost.items()]
        parts += [f"{self.short} of {self.runs} short (too few steps to tell)"] if self.short else []
        parts += [f"{self.broken} left out (an error or an interruption)"] if self.broken else []
        return f"{self.name}: {', '.join(parts)}" if parts else ""


def lower(
    trials: Trials, a: Arm, *, than: Arm, column: str = "eval_loss", by: float = 0.005, any_status: bool = False
) -> Finding:
    """Whether arm ``a`` has the lower value, paired over seeds.

    Holds if the difference's 95 % interval lies below 0 and the paired t test's p is below .05; fails if a difference
    of ``by`` is excluded; else, and with fewer than 3 pairs, inconclusive. ``any_status``: compare all runs, however
    they ended, for a column that means something in a run that diverged (its spikes, the rate it reached).
    """
    return _compare(trials, a, than, column=column, by=by, any_status=any_status)


def higher(
    trials: Trials, a: Arm, *, than: Arm, column: str = "eval_loss", by: float = 0.005, any_status: bool = False
) -> Finding:
    """Whether arm ``a`` has the higher value: ``lower`` with the sides exchanged.

    A loss is higher, too, where most runs of ``a`` do not train and most of the other's do.
    """
    return _compare(trials, a, than, column=column, by=by, any_status=any_status, higher=True)


def ordered(trials: Trials, arms: Sequence[Arm], *, column: str = "eval_loss", by: float = 0.005) -> Finding:
    """Whether the arms' values rise in this order: each arm ``lower`` than the next."""
    return all_of(*(lower(trials, a, than=b, column=column, by=by) for a, b in itertools.pairwise(arms)))


def equivalent(trials: Trials, a: Arm, b: Arm, *, within: float = 0.02, column: str = "eval_loss") -> Finding:
    """Whether the arms differ by less than ``within``: two one-sided tests on the pairs, an interval inside."""
    ours, other = _read(trials, a, column), _read(trials, b, column)
    if (lopsided := _by_status(ours, other, column)) is not None:
        same = lopsided.verdict == Verdict.INCONCLUSIVE
        return lopsided if same else Finding(verdict=Verdict.FAILS, ours=lopsided.ours, seeds=lopsided.seeds)
    finding = equivalent_in_pairs(ours.values, other.values, names=(ours.name, other.name), within=within)
    return _with_notes(finding, ours, other)


def no_worse(trials: Trials, a: Arm, *, than: Arm, within: float = 0.01, column: str = "eval_loss") -> Finding:
    """Whether arm ``a`` is at most ``within`` above the other: lower, or level."""
    ours, other = _read(trials, a, column), _read(trials, than, column)
    if (lopsided := _by_status(ours, other, column)) is not None:
        return lopsided
    finding = not_above_in_pairs(ours.values, other.values, names=(ours.name, other.name), within=within)
    return _with_notes(finding, ours, other)


def values_of(trials: Trials, arm: Arm, column: str = "eval_loss") -> dict[int, float]:
    """An arm's values of a column by seed, of the runs that trained."""
    return _read(trials, arm, column).values


def fails_to_train(trials: Trials, a: Arm) -> Finding:
    """Whether at least two thirds of the arm's seeds diverged or got stuck; it fails if at most a third did."""
    return _share(trials, a, NOT_TRAINED, "did not train")


def trains(trials: Trials, a: Arm) -> Finding:
    """Whether at least two thirds of the arm's seeds finished and learned; it fails if at most a third did."""
    return _share(trials, a, (Status.FINISHED.value,), "trained")


def optimum(trials: Trials, a: Arm, column: str = "eval_loss") -> Optimum:
    """The best learning rate of an arm's sweep: a parabola through the mean losses over log rate.

    Runs that diverged or got stuck make their rate infinitely bad; those that failed or were interrupted say nothing.
    Raises ValueError if no rate trains.
    """
    table = trials.arm(a).table
    table = table[table["status"].isin([*TRAINED, *NOT_TRAINED])]
    losses = {}
    for rate, rows in table.groupby("learning_rate"):
        trained = rows["status"].isin(TRAINED).all()
        losses[float(rate)] = float(rows[column].mean()) if trained else float("inf")
    return parabola_optimum(losses)


def _compare(
    trials: Trials, a: Arm, b: Arm, *, column: str, by: float, any_status: bool, higher: bool = False
) -> Finding:
    ours, other = (_read(trials, arm, column, any_status=any_status) for arm in (a, b))
    if (lopsided := _by_status(*((other, ours) if higher else (ours, other)), column)) is not None:
        return lopsided
    finding = lower_in_pairs(ours.values, other.values, names=(ours.name, other.name), by=by, higher=higher)
    return _with_notes(finding, ours, other)


def _read(trials: Trials, arm: Arm, column: str, *, any_status: bool = False) -> _Arm:
    rows: Frame = trials.by_seed(arm, column)
    if any_status:
        rows = rows.assign(status=Status.FINISHED.value)
    statuses = rows["status"].astype(str)
    values = rows.loc[statuses.isin(TRAINED), column].dropna()
    lost = statuses[statuses.isin(NOT_TRAINED)].value_counts()
    return _Arm(
        name=label(arm),
        values={int(seed): float(value) for seed, value in values.items()},
        lost={str(status): int(count) for status, count in lost.items()},
        broken=int((~statuses.isin([*TRAINED, *NOT_TRAINED])).sum()),
        short=int(statuses.eq(Status.SHORT.value).sum()),
    )


def _by_status(a: _Arm, b: _Arm, column: str) -> Finding | None:
    """The finding where an arm does not train, so that there is nothing to compare; None where both do.

    Two arms that ended before they had learned, at any of their rates, have no order either.
    """
    if all(arm.values and arm.short >= MOST * len(arm.values) for arm in (a, b)):
        unlearned = f"{a.name} {number(a.mean)} vs {b.name} {number(b.mean)}"
        return Finding(
            verdict=Verdict.INCONCLUSIVE,
            ours=unlearned,
            seeds=min(a.runs, b.runs),
            note=f"neither {a.name} nor {b.name} has learned yet",
        )
    if a.lost_share < MOST and b.lost_share < MOST:
        return None
    seeds = min(a.runs, b.runs)
    ours = f"{_ending(a)} vs {_ending(b)}"
    if seeds < TOO_FEW:
        return too_few((a.name, b.name), seeds)
    if column not in ("eval_loss", "perplexity", "bits_per_byte"):
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=ours, seeds=seeds, note="an arm does not train")
    if a.lost_share <= FEW:
        return Finding(verdict=Verdict.HOLDS, ours=ours, seeds=seeds)
    if b.lost_share <= FEW:
        return Finding(verdict=Verdict.FAILS, ours=ours, seeds=seeds)
    return Finding(verdict=Verdict.INCONCLUSIVE, ours=ours, seeds=seeds, note="neither arm trains in most seeds")


def _ending(arm: _Arm) -> str:
    if arm.lost_share < MOST:
        return f"{arm.name} {number(arm.mean)}" if arm.values else f"{arm.name}: no run"
    how = " and ".join(f"{count} {status}" for status, count in arm.lost.items())
    return f"{arm.name} does not train ({how} of {arm.runs})"


def _share(trials: Trials, arm: Arm, statuses: Sequence[str], what: str) -> Finding:
    rows = trials.by_seed(arm, "status")["status"].astype(str)
    rows = rows[rows.isin([*TRAINED, *NOT_TRAINED])]
    count, runs = int(rows.isin(list(statuses)).sum()), len(rows)
    ended = ", ".join(f"{number} {status}" for status, number in rows.value_counts().items())
    if runs < TOO_FEW:
        verdict = Verdict.INCONCLUSIVE
    elif count >= MOST * runs:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS if count <= FEW * runs else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=f"{label(arm)}: {count} of {seeds_text(runs)} {what} ({ended or 'no run'})",
        margin=count / runs if runs else None,
        seeds=runs,
        note=f"fewer than {TOO_FEW} seeds" if runs < TOO_FEW else "",
    )


def _with_notes(finding: Finding, a: _Arm, b: _Arm) -> Finding:
    for note in filter(None, (a.note(), b.note())):
        finding = finding.noted(note)
    return finding
