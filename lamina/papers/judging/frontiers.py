"""Policies at equal KL: equal steps favor the one whose logits move faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lamina.core.frames import Frame
from lamina.papers.judging.curves import trained
from lamina.papers.judging.differences import BySeed
from lamina.papers.judging.iso_loss import interpolated
from lamina.papers.judging.trials import Arm, Trials

Frontier: TypeAlias = Sequence[tuple[float, float]]
"""The reward that a policy had at each KL to its start, in nats per answer, sorted by the KL."""


def frontiers(trials: Trials, arm: Arm) -> dict[int, Frontier]:
    """By seed, the reward-KL frontier of an arm's policy: its means over the held-out prompts at each evaluation.

    ``trials``: of the stage with the policies, which records ``held_out``. Seeds that did not train are left out.
    """
    chosen = trained(trials.arm(arm))
    if not len(chosen):
        return {}
    table: Frame = chosen.record("held_out")
    found: dict[int, Frontier] = {}
    for seed, rows in table.groupby("seed"):
        means = rows.groupby("step")[["kl", "reward"]].mean()
        found[int(str(seed))] = sorted((float(kl), float(reward)) for kl, reward in means.to_numpy())
    return found


def at_equal_kl(arms: Mapping[str, Mapping[int, Frontier]]) -> tuple[Mapping[str, BySeed], BySeed]:
    """Each arm's reward by seed at the largest KL that all of the arms reached with that seed, and these KLs.

    ``arms``: the frontiers by seed, by any name. Between two evaluations the reward is interpolated.
    """
    seeds = set.intersection(*(set(by_seed) for by_seed in arms.values()))
    reached = {seed: min(by_seed[seed][-1][0] for by_seed in arms.values()) for seed in sorted(seeds)}
    rewards = {
        name: {seed: interpolated(by_seed[seed], kl) for seed, kl in reached.items()} for name, by_seed in arms.items()
    }
    return rewards, reached
