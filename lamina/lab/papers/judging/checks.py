"""Compare configurations by their losses or another column, paired by seed.

A run that diverged or got stuck near the unigram entropy ranks last. A configuration with more failed runs than the
other configuration cannot win.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lamina.core.frames import Frame
from lamina.core.intervals import ALPHA
from lamina.errors import UserError
from lamina.jobs.names import RESULTS
from lamina.jobs.seals import refuse_tables
from lamina.jobs.status import Status
from lamina.lab.papers.judging.findings import (
    FEW,
    MOST,
    TOO_FEW,
    Finding,
    Region,
    Verdict,
    all_of,
    inconclusive,
    mean,
    number,
    pairs_in,
    seeds_text,
    too_few,
)
from lamina.lab.papers.judging.statistics import (
    Optimum,
    parabola_optimum,
    share_above,
    share_interval,
    shares_differ,
)
from lamina.lab.papers.judging.trials import Arm, Trials, label

TRAINED = (Status.FINISHED.value, Status.SHORT.value)
_ENDED = {Status.DIVERGED.value: "diverged", Status.STUCK.value: "got stuck"}
NOT_TRAINED = (*_ENDED,)
SMALLEST = 0.01
"""The smallest difference in loss that counts, in nats per token."""
_LOSSES = ("eval_loss", "perplexity", "bits_per_byte", "eval_corpus_loss")
_GAINS = ("accuracy", "score", "eval_reward")


def _worst(column: str) -> float:
    """Return the infinite value that ranks failed runs last, or NaN if high and low values are equally good."""
    if column in _LOSSES:
        return math.inf
    return -math.inf if column.startswith(_GAINS) else math.nan


@dataclass(frozen=True)
class _Arm:
    name: str
    values: dict[int, float]  # seed -> value, for runs that trained
    lost: dict[str, int]  # status -> number of failed runs (diverged or stuck)
    lost_seeds: tuple[int, ...]
    broken: int  # number of runs with an error or an interruption
    short: int = 0  # number of runs that ended before they had learned; their values count

    @property
    def failed(self) -> int:
        return len(self.lost_seeds)

    @property
    def runs(self) -> int:
        return len(self.values) + self.failed

    @property
    def lost_share(self) -> float:
        return self.failed / self.runs if self.runs else 0.0

    def ranked(self, column: str) -> dict[int, float]:
        """Return the values by seed. Failed runs get the infinite value that ranks last."""
        return {**self.values, **dict.fromkeys(self.lost_seeds, _worst(column))}

    def note(self) -> str:
        parts = [f"{count} of {self.runs} runs {_ENDED[status]}" for status, count in self.lost.items()]
        if self.failed:
            low, high = share_interval(self.failed, self.runs)
            parts[-1] += f" (95 % interval of the share that failed: {low:.0%} to {high:.0%})"
        parts += [f"{self.short} of {self.runs} runs are too short to tell"] if self.short else []
        parts += (
            [f"Lamina leaves out {self.broken} runs that ended with an error or an interruption"] if self.broken else []
        )
        return f"in the setting {self.name}, {', '.join(parts)}" if parts else ""


def lower(
    trials: Trials,
    a: Arm,
    *,
    than: Arm,
    column: str = "eval_loss",
    by: float | None = None,
    any_status: bool = False,
) -> Finding:
    """Judge whether a configuration has lower values than another configuration, paired by seed.

    The claim holds if the 95 % t interval of the difference is below 0. The mean difference must also be at least
    ``by`` in size. If the rule holds with both configurations exchanged, the verdict is `reversed`. If a test at the
    same level rules out a difference of ``by``, the verdict is `excluded`. If no rule applies, or if there are fewer
    than 3 pairs, the verdict is `inconclusive`.

    Args:
        a: the configuration with lower values, according to the claim.
        than: the other configuration.
        by: the smallest difference that counts (default for a loss: 0.01). Other columns have no default.
        any_status: whether failed runs also count, as for a column with the number of spikes.
    """
    return _compared(trials, (a, than), column, Region(below=0.0), by=by, any_status=any_status)


def higher(
    trials: Trials,
    a: Arm,
    *,
    than: Arm,
    column: str = "eval_loss",
    by: float | None = None,
    any_status: bool = False,
) -> Finding:
    """Judge whether a configuration has higher values than another configuration, by the rules of ``lower``."""
    return _compared(trials, (a, than), column, Region(above=0.0), by=by, any_status=any_status)


def ordered(trials: Trials, arms: Sequence[Arm], *, column: str = "eval_loss", by: float | None = None) -> Finding:
    """Judge whether the configurations' values rise in the given order."""
    return all_of(*(lower(trials, a, than=b, column=column, by=by) for a, b in itertools.pairwise(arms)))


def equivalent(trials: Trials, a: Arm, b: Arm, *, within: float = 0.02, column: str = "eval_loss") -> Finding:
    """Judge whether two configurations differ by less than a limit, with two one-sided tests, paired by seed."""
    region = Region(above=-within, below=within, text=f", claimed within {number(within)}")
    return _compared(trials, (a, b), column, region)


def no_worse(trials: Trials, a: Arm, *, than: Arm, within: float = 0.01, column: str = "eval_loss") -> Finding:
    """Judge whether a configuration's values are at most ``within`` above another configuration's values."""
    region = Region(below=within, text=f", claimed at most {number(within)}")
    return _compared(trials, (a, than), column, region)


def values_of(trials: Trials, arm: Arm, column: str = "eval_loss") -> dict[int, float]:
    """Return a configuration's values in a column, by seed, without failed runs."""
    return _read(trials, arm, column).values


def same_as_recorded(trials: Trials, a: Arm, *, record: Path, axis: str, value: str, where: str) -> Finding:
    """Judge with Welch's t test whether a configuration's held-out loss equals a recorded loss of another study.

    Args:
        a: the configuration in this study.
        record: the folder of the other study's record. If the folder is missing, the verdict is inconclusive.
        axis: a compared setting of the other study.
        value: the value of ``axis`` in the recorded configuration.
        where: the other study's name, for the verdict's text.
    """
    import pandas as pd
    from scipy import stats

    ours, other = list(values_of(trials, a).values()), list[float]()
    refuse_tables(record)
    if (path := record / RESULTS).is_file():
        rows = pd.read_csv(path)
        other = rows.loc[(rows[axis] == value) & rows["tuned"].astype(bool), "eval_loss"].dropna().tolist()
    if min(len(ours), len(other)) < TOO_FEW:
        return inconclusive(f"{len(ours)} runs here, {len(other)} recorded at {where}", "")
    p = float(cast(Any, stats.ttest_ind(ours, other, equal_var=False)).pvalue)
    gap = mean(ours) - mean(other)
    text = f"{len(ours)} runs here, {len(other)} at {where}: means {gap:+.4f} apart, Welch's t test p {p:.2g}"
    return Finding(verdict=Verdict.HOLDS if p >= ALPHA else Verdict.FAILS, ours=text, margin=gap, seeds=len(ours))


def fails_to_train(trials: Trials, a: Arm) -> Finding:
    """Judge whether at least two thirds of a configuration's runs diverged or got stuck.

    The claim holds only if an exact test also shows a failure probability above one third. The claim is reversed if at
    most one third of the runs failed. An exact test must then show a failure probability below two thirds.
    """
    return _share(trials, a, NOT_TRAINED, "did not train")


def trains(trials: Trials, a: Arm) -> Finding:
    """Judge whether at least two thirds of a configuration's runs trained, with the tests of ``fails_to_train``."""
    return _share(trials, a, (Status.FINISHED.value,), "trained")


def optimum(trials: Trials, a: Arm, column: str = "eval_loss") -> Optimum:
    """Estimate a configuration's best learning rate, with a parabola through the mean losses.

    If any run at a learning rate diverged or got stuck, the mean loss is infinite. Lamina ignores interrupted runs and
    runs with an error. Raises ValueError if no learning rate trains.
    """
    chosen = trials.arm(a)
    if len(chosen.seeds) > 1:
        chosen.choose_rate()
    table = chosen.rows
    table = table[table["status"].isin([*TRAINED, *NOT_TRAINED])]
    losses = {}
    for rate, rows in table.groupby("learning_rate"):
        trained = rows["status"].isin(TRAINED).all()
        losses[float(rate)] = float(rows[column].mean()) if trained else float("inf")
    return parabola_optimum(losses)


def _compared(
    trials: Trials,
    arms: tuple[Arm, Arm],
    column: str,
    region: Region,
    *,
    by: float | None = 0.0,
    any_status: bool = False,
) -> Finding:
    ours, other = (_read(trials, arm, column, any_status=any_status) for arm in arms)
    if by is None and column != "eval_loss":
        raise UserError(f"by: give the smallest difference that matters for {column!r}, in the unit of {column!r}.")
    region = replace(region, least=SMALLEST if by is None else by)
    if (failures := _by_failures(ours, other, column, region)) is not None:
        return failures
    finding = pairs_in(region, ours.ranked(column), other.ranked(column), names=(ours.name, other.name))
    if not math.isnan(worst := _worst(column)):
        # the configuration that the verdict favors, and the other one
        favors = (ours, other) if (worst > 0) == (region.below < math.inf) else (other, ours)
        winner, loser = favors if finding.verdict.shown else favors[::-1]
        level = math.isfinite(region.above) and math.isfinite(region.below)
        if finding.verdict.decided and (winner.failed > loser.failed or (level and ours.failed < other.failed)):
            often, rare = sorted((ours, other), key=lambda arm: -arm.failed)
            finding = finding.undecided(
                f"{often.name} failed more often ({often.failed} of {often.runs}) than {rare.name} ({rare.failed} of "
                f"{rare.runs})"
            )
    for note in filter(None, (ours.note(), other.note())):
        finding = finding.noted(note)
    return finding


def _read(trials: Trials, arm: Arm, column: str, *, any_status: bool = False) -> _Arm:
    rows: Frame = trials.by_seed(arm, column)
    if any_status:
        rows = rows.assign(status=Status.FINISHED.value)
    statuses = rows["status"].astype(str)
    values = rows.loc[statuses.isin(TRAINED), column].dropna()
    lost = statuses[statuses.isin(NOT_TRAINED)]
    return _Arm(
        name=label(arm),
        values={int(seed): float(value) for seed, value in values.items()},
        lost={str(status): int(count) for status, count in lost.value_counts().items()},
        lost_seeds=tuple(int(seed) for seed in lost.index),
        broken=int((~statuses.isin([*TRAINED, *NOT_TRAINED])).sum()),
        short=int(statuses.eq(Status.SHORT.value).sum()),
    )


def _by_failures(a: _Arm, b: _Arm, column: str, region: Region) -> Finding | None:
    """Compare the failure rates by Fisher's exact test, if most runs of a configuration failed.

    Returns None if most runs of both configurations trained. If neither configuration has learned, the finding is
    inconclusive.
    """
    seeds = min(a.runs, b.runs)
    if all(arm.values and arm.short >= MOST * len(arm.values) for arm in (a, b)):
        means = (sum(arm.values.values()) / len(arm.values) for arm in (a, b))
        unlearned = " vs ".join(f"{arm.name} {number(mean)}" for arm, mean in zip((a, b), means, strict=True))
        return inconclusive(unlearned, f"neither {a.name} nor {b.name} has learned yet", seeds)
    if a.lost_share < MOST and b.lost_share < MOST:
        return None
    if seeds < TOO_FEW:
        return too_few((a.name, b.name), a.values, b.values, seeds)
    ours, worst = f"{_ending(a)} vs {_ending(b)}", _worst(column)
    if math.isnan(worst):
        return inconclusive(ours, "one of the two settings does not train", seeds)
    p = shares_differ((a.failed, b.failed), (a.runs, b.runs))
    sides = [bound for bound in (region.below, -region.above) if math.isfinite(bound)]
    lowest = a if (a.lost_share < b.lost_share) == (worst > 0) else b
    inside = len(sides) == 1 and lowest is (a if region.below < math.inf else b)
    outside = Verdict.REVERSED if len(sides) == 1 else Verdict.FAILS
    verdict = (Verdict.HOLDS if inside else outside) if p < ALPHA else Verdict.INCONCLUSIVE
    finding = Finding(
        verdict=verdict,
        ours=f"{ours} (Fisher's exact test for different fractions of failed runs: p {p:.2g})",
        p=p if inside else 1.0,
        p_not=1.0 if inside else p,
        seeds=seeds,
    )
    return (
        finding
        if p < ALPHA
        else finding.noted("the runs are too few to tell whether the fractions of failed runs differ")
    )


def _ending(arm: _Arm) -> str:
    if arm.lost_share < MOST:
        return (
            f"{arm.name} {number(sum(arm.values.values()) / len(arm.values))}" if arm.values else f"{arm.name}: no run"
        )
    how = " and ".join(f"{count} {_ENDED[status]}" for status, count in arm.lost.items())
    return f"{arm.name} does not train ({how} of {arm.runs} runs)"


def _share(trials: Trials, arm: Arm, statuses: Sequence[str], what: str) -> Finding:
    rows = trials.by_seed(arm, "status")["status"].astype(str)
    rows = rows[rows.isin([*TRAINED, *NOT_TRAINED])]
    count, runs = int(rows.isin(list(statuses)).sum()), len(rows)
    ended = ", ".join(f"{number} {status}" for status, number in rows.value_counts().items())
    ours = f"{label(arm)}: {count} of {seeds_text(runs)} {what} ({ended or 'no run'})"
    if runs < TOO_FEW:
        return inconclusive(ours, f"fewer than {TOO_FEW} seeds", runs)
    p, p_not = share_above(count, runs, FEW), share_above(runs - count, runs, FEW)
    low, high = share_interval(count, runs)
    verdict = Verdict.HOLDS if count >= MOST * runs and p < ALPHA else Verdict.INCONCLUSIVE
    verdict = Verdict.REVERSED if count <= FEW * runs and p_not < ALPHA else verdict
    return Finding(
        verdict=verdict,
        ours=f"{ours}, share 95 % {low:.0%} to {high:.0%}",
        margin=count / runs,
        interval=(low, high),
        p=p,
        p_not=p_not,
        seeds=runs,
    )
