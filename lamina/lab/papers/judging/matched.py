"""Compare configurations on equal terms: at equal pretraining loss, or at equal KL to the initial model.

A lower pretraining loss alone may explain a better result after fine-tuning. Lamina therefore pretrains the other
configuration longer, and compares both configurations at equal loss. In reinforcement learning, policies
whose logits change faster have an advantage at equal steps. Lamina therefore compares policies at equal KL.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lamina.core.frames import Frame
from lamina.lab.papers.judging.checks import higher, values_of
from lamina.lab.papers.judging.curves import trained
from lamina.lab.papers.judging.findings import BySeed, Finding, Verdict, seeds_text
from lamina.lab.papers.judging.trials import Arm, Trials, label
from lamina.lab.papers.judging.value_checks import compare_values


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A configuration's losses after one length of pretraining, and values after fine-tuning, by seed."""

    losses: BySeed
    values: BySeed


def better_at_equal_loss(
    trials: Trials,
    a: Arm,
    *,
    than: Arm,
    longer: Sequence[Arm],
    stage: str,
    column: str = "score",
    by: float = 1.0,
) -> Finding:
    """Judge whether a configuration is better after fine-tuning, also at equal pretraining loss.

    Args:
        a: the configuration with higher values, according to the claim.
        than: the other configuration.
        longer: the other configuration after longer pretraining.
        stage: the job after pretraining, such as "sft".
        by: the smallest difference that counts.
    """
    tuned = trials.tuned()
    after, before = tuned.where(stage=stage), tuned.where(stage="pretrain")
    raw = higher(after, a, than=than, column=column, by=by)
    ours, *rivals = (
        Budget(losses=values_of(before, arm), values=values_of(after, arm, column)) for arm in (a, than, *longer)
    )
    return iso_loss(raw, ours, rivals, by=by, names=(label(a), label(than)))


def at_other_budgets(trials: Trials, arm: Mapping[str, object]) -> list[Arm]:
    """Return the configuration with each other value of the setting "budget" (the length of pretraining)."""
    fixed = {name: value for name, value in arm.items() if name != "budget"}
    return [{**fixed, "budget": value} for value in trials.where(**fixed).values("budget") if value != arm["budget"]]


def iso_loss(raw: Finding, ours: Budget, others: Sequence[Budget], *, by: float, names: tuple[str, str]) -> Finding:
    """Judge whether configuration A has higher values than configuration B, also at equal pretraining loss.

    Args:
        raw: the finding for the claim that A has higher values than B after equally long pretraining.
        ours: the pretraining losses and the values of A's runs.
        others: the losses and values of B's runs, one entry per length of pretraining.
        by: the smallest difference that counts.
        names: the names of A and B.

    Returns:
        The finding ``raw`` with the numbers at equal loss. If ``raw`` holds and A is also higher at equal loss, the
            verdict becomes `holds at iso-loss`. If ``raw`` holds but a test rules out a difference of ``by`` at equal
            loss, the verdict becomes `explained by loss`. A new verdict has the larger p value of both tests.
    """
    matched = at_loss(others, ours.losses)
    equal = compare_values(ours.values, matched, lower=False, by=by, names=(names[0], f"{names[1]} at equal loss"))
    lost = len((ours.losses.keys() & ours.values.keys()) - matched.keys())
    note = ""
    if lost > 0:
        note = f"the comparison at equal loss leaves out {seeds_text(lost)}: no {names[1]} run has such a low loss"
    parts = (*raw.lines, *equal.lines)
    joined = replace(raw, ours="; ".join(parts), parts=parts).noted("; ".join(filter(None, [equal.note, note])))
    if raw.verdict != Verdict.HOLDS:
        return joined
    if equal.verdict == Verdict.HOLDS or equal.verdict.failed:
        verdict = Verdict.EXPLAINED if equal.verdict.failed else Verdict.HOLDS_AT_ISO_LOSS
        p = max(raw.p or 0.0, (equal.p_not if equal.verdict.failed else equal.p) or 0.0)
        return replace(joined, verdict=verdict, margin=equal.margin, interval=equal.interval, p=p, seeds=equal.seeds)
    return joined.noted("we cannot tell whether the lower loss alone causes this difference")


def at_loss(budgets: Sequence[Budget], losses: BySeed) -> BySeed:
    """Estimate a configuration's value at a given loss for each seed, by interpolation between lengths of pretraining.

    If the loss is above all the configuration's losses, the result is the value at the highest loss. This can only
    favor the configuration. If the loss is below all the configuration's losses, Lamina leaves out the seed.
    """
    scores: dict[int, float] = {}
    for seed, loss in losses.items():
        pairs = ((each.losses.get(seed, math.nan), each.values.get(seed, math.nan)) for each in budgets)
        points = sorted(pair for pair in pairs if all(map(math.isfinite, pair)))
        if points and loss >= points[0][0]:
            scores[seed] = interpolated(points, loss)
    return scores


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between sorted points. Outside the points, return the nearest point's value."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if x <= right:
            return low if right == left else low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


Frontier: TypeAlias = Sequence[tuple[float, float]]
"""A policy's pairs of KL and reward, sorted by KL. The KL to the initial model is in nats per answer."""


def frontiers(trials: Trials, arm: Arm) -> dict[int, Frontier]:
    """Return each seed's mean KL and mean reward over prompts, at each evaluation. Lamina leaves out failed seeds."""
    chosen = trained(trials.arm(arm))
    if not len(chosen):
        return {}
    means: Frame = chosen.record("held_out").groupby(["seed", "step"])[["kl", "reward"]].mean()
    return {int(seed): sorted(map(tuple, rows.to_numpy().tolist())) for seed, rows in means.groupby("seed")}


def at_equal_kl(arms: Mapping[str, Mapping[int, Frontier]]) -> tuple[Mapping[str, BySeed], BySeed]:
    """Compare policies at equal KL. Returns each configuration's rewards by seed, and the KL by seed.

    Each seed's KL is the largest KL that all configurations reached. Lamina interpolates rewards between evaluations.
    """
    seeds = set.intersection(*(set(by_seed) for by_seed in arms.values()))
    reached = {seed: min(by_seed[seed][-1][0] for by_seed in arms.values()) for seed in sorted(seeds)}
    rewards = {
        name: {seed: interpolated(by_seed[seed], kl) for seed, kl in reached.items()} for name, by_seed in arms.items()
    }
    return rewards, reached
