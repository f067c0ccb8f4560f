"""The candidates of a search: how far each came, and which of two is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from lamina.core.json_types import Json
from lamina.jobs.status import ENDED, Status
from lamina.studies.trials.store import UNTRAINED
from lamina.training.monitoring.falling import read_metrics

WORST_P = 0.1
"""A candidate leaves the race if Wilcoxon's test on the shared seeds says with this p that it is worse."""
LOST_LOSS = 1e9
"""The loss of a run that did not train, where a number is needed: worse than any, and finite."""
ORDER = ("won", "raced", "finished", "dropped in the race", "pruned", "diverged", "failed")
"""The states of candidates, the best first; "failed" is an error, and the next call tries it again."""


@dataclass
class Candidate:
    """What Optuna proposed.

    Attributes:
        number: its place in the order of the proposals.
        settings: as proposed.
        state: one of ``ORDER``, or "proposed".
        loss: the mean over the seeds that trained, if none did over those that got stuck; or that of the last rung; NaN
            without one.
        seeds: with how many it ran to the end.
        lost: how many of them diverged or got stuck.
        rungs: the loss at each rung that it came to, by the rung's place.
        key: of its trial with the first seed.
    """

    number: int
    settings: Json
    state: str = "proposed"
    loss: float = math.nan
    seeds: int = 0
    lost: int = 0
    rungs: dict[int, float] = field(default_factory=dict)
    key: str = ""

    @property
    def rank(self) -> tuple[float, float]:
        """The order of candidates: the smallest share of seeds that were lost, then the lowest loss."""
        return self.lost / max(1, self.seeds), math.inf if math.isnan(self.loss) else self.loss

    def count(self, results: Iterable[Json]) -> None:
        """Take the numbers of its runs to the end, one result per seed."""
        ended = [result for result in results if result["status"] in ENDED]
        trained = [result for result in ended if loss_of(result) < LOST_LOSS]
        losses = [float(one["eval_loss"]) for one in trained or ended if one.get("eval_loss") is not None]
        self.seeds, self.lost = len(ended), len(ended) - len(trained)
        self.loss = math.fsum(losses) / len(losses) if losses else math.nan


def loss_of(result: Json) -> float:
    """The eval loss of a run that was paused or has ended; ``LOST_LOSS`` of one that diverged or got stuck."""
    loss = result.get("eval_loss")
    return LOST_LOSS if loss is None or result["status"] in UNTRAINED else float(loss)


def loss_at(folder: Path, step: int, result: Json) -> float:
    """The eval loss that a trial had at a step, or at its last evaluation before it; else that of its result.

    The trial may have gone on since, for a candidate with the same settings or for another study.
    """
    losses = [result["eval_loss"]]
    if (folder / "metrics.jsonl").is_file():
        losses += [one["eval_loss"] for one in read_metrics(folder) if "eval_loss" in one and one["step"] <= step]
    return float(losses[-1])


def has_failed(result: Json) -> bool:
    """Whether a run broke, or stopped before it had a loss: that says nothing about its settings."""
    lacks = result["status"] != Status.DIVERGED and result.get("eval_loss") is None
    return result["status"] not in (*ENDED, Status.INTERRUPTED) or lacks


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best first."""
    places = {state: place for place, state in enumerate(ORDER)}
    return sorted(candidates, key=lambda c: (places.get(c.state, len(ORDER)), c.rank, c.number))


def best_at(candidates: Iterable[Candidate], place: int, keep: int) -> set[int]:
    """The numbers of the best at a rung: one in ``keep`` of all that came to it, one at least."""
    losses = sorted((c.rungs[place], c.number) for c in candidates if place in c.rungs)
    return {number for _, number in losses[: max(1, round(len(losses) / keep))]}


def worse(losses: Mapping[int, float], best: Mapping[int, float]) -> bool:
    """Whether losses by seed are above another's on the seeds that both have, by Wilcoxon's one-sided test."""
    from scipy import stats  # it takes a second to load

    differences = [loss - best[seed] for seed, loss in losses.items() if seed in best]
    if len(differences) < 4 or not any(differences):  # with fewer, no p is below the threshold
        return False
    _, p = cast(tuple[float, float], stats.wilcoxon(differences, alternative="greater"))
    return p < WORST_P
