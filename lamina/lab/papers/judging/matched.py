"""Compare settings on equal terms: at equal pretraining loss, or at equal KL to the initial model.

If a setting ended pretraining at a lower loss, this loss alone may explain a better result later. Lamina therefore
pretrains the other setting longer, and compares the two settings at equal loss. At equal steps, a policy whose logits
move faster has an advantage. Lamina therefore compares policies at equal KL.
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
    """A setting's results for one length of pretraining, by seed: the loss after pretraining, and the value after
    tuning.
    """

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
    """Judge whether setting ``a`` has the higher value after a stage, and whether its lower loss alone explains the
    value.

    ``longer`` is the other setting with more pretraining. ``iso_loss`` has the rules.
    """
    tuned = trials.tuned()
    after, before = tuned.where(stage=stage), tuned.where(stage="pretrain")
    raw = higher(after, a, than=than, column=column, by=by)
    ours, *rivals = (
        Budget(losses=values_of(before, arm), values=values_of(after, arm, column)) for arm in (a, than, *longer)
    )
    return iso_loss(raw, ours, rivals, by=by, names=(label(a), label(than)))


def at_other_budgets(trials: Trials, arm: Mapping[str, object]) -> list[Arm]:
    """Return the same setting with every other length of pretraining (the study's axis ``budget``)."""
    fixed = {name: value for name, value in arm.items() if name != "budget"}
    return [{**fixed, "budget": value} for value in trials.where(**fixed).values("budget") if value != arm["budget"]]


def iso_loss(raw: Finding, ours: Budget, others: Sequence[Budget], *, by: float, names: tuple[str, str]) -> Finding:
    """Add a comparison at equal loss to the finding ``raw`` (our values are higher).

    ``others`` has the other setting's results for several lengths of pretraining. ``at_loss`` interpolates the other
    setting's value at the loss of ``ours``.

    Returns:
        If ``raw`` does not hold, the result is ``raw``. Otherwise, the verdict is ``holds at iso-loss`` if our values
        are also higher at equal loss. If the test at equal loss excludes a difference of ``by``, the verdict is
        ``explained by loss``. If this test cannot tell, the verdict is ``holds``. The verdicts ``holds at iso-loss``
        and ``explained by loss`` need two tests, so their p value is the larger p value.
    """
    matched = at_loss(others, ours.losses)
    equal = compare_values(ours.values, matched, lower=False, by=by, names=(names[0], f"{names[1]} at equal loss"))
    lost = len((ours.losses.keys() & ours.values.keys()) - matched.keys())
    note = ""
    if lost > 0:
        note = f"Lamina leaves out {seeds_text(lost)} at equal loss, because no {names[1]} run reaches their loss"
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
    """Interpolate a setting's value at each seed's loss, between the two lengths of pretraining with the nearest
    losses.

    If a loss is above all losses of the setting, the function returns the value at the setting's highest loss. This
    value can only favor the setting, because it belongs to a lower loss. Lamina leaves out a loss below all losses of
    the setting, because the value at this loss is unknown.
    """
    scores: dict[int, float] = {}
    for seed, loss in losses.items():
        pairs = ((each.losses.get(seed, math.nan), each.values.get(seed, math.nan)) for each in budgets)
        points = sorted(pair for pair in pairs if all(map(math.isfinite, pair)))
        if points and loss >= points[0][0]:
            scores[seed] = interpolated(points, loss)
    return scores


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate y at x between sorted points. Outside the points, return the nearest point's y."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if x <= right:
            return low if right == left else low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


Frontier: TypeAlias = Sequence[tuple[float, float]]
"""A policy's reward at each KL to its initial model, in nats per answer, sorted by the KL."""


def frontiers(trials: Trials, arm: Arm) -> dict[int, Frontier]:
    """Return the reward and KL of a setting's policy at each evaluation, averaged over the prompts, by seed.

    ``trials`` are the trials of the policies' stage, which must record ``held_out``. Lamina leaves out seeds that
    did not train.
    """
    chosen = trained(trials.arm(arm))
    if not len(chosen):
        return {}
    means: Frame = chosen.record("held_out").groupby(["seed", "step"])[["kl", "reward"]].mean()
    return {int(seed): sorted(map(tuple, rows.to_numpy().tolist())) for seed, rows in means.groupby("seed")}


def at_equal_kl(arms: Mapping[str, Mapping[int, Frontier]]) -> tuple[Mapping[str, BySeed], BySeed]:
    """For each seed, return the largest KL that all settings reached, and each setting's reward at this KL.

    The result is the rewards by setting and seed, then the KLs by seed. ``arms`` maps each setting's name to its
    frontiers by seed. Lamina interpolates the reward between two evaluations.
    """
    seeds = set.intersection(*(set(by_seed) for by_seed in arms.values()))
    reached = {seed: min(by_seed[seed][-1][0] for by_seed in arms.values()) for seed in sorted(seeds)}
    rewards = {
        name: {seed: interpolated(by_seed[seed], kl) for seed, kl in reached.items()} for name, by_seed in arms.items()
    }
    return rewards, reached
