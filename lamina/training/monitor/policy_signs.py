"""Find trouble in reinforcement learning (GRPO, RLOO) from the numbers that the trainer logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from lamina.core.json_types import Json
from lamina.training.monitor.writers import MODEL, Row

EQUAL, ENTROPY, KL, CUT = "equal_rewards", "policy_entropy", "policy_kl", "cut_completions"
LENGTH, REWARD, SPREAD = "completion_length", "mean_reward", "reward_spread"
LOGGED = {
    "frac_reward_zero_std": EQUAL,
    "entropy": ENTROPY,
    "kl": KL,
    "completions/clipped_ratio": CUT,
    "completions/mean_length": LENGTH,
    "reward": REWARD,
    "reward_std": SPREAD,
    "actor/entropy": ENTROPY,
    "actor/kl_loss": KL,
    "response_length/clip_ratio": CUT,
    "response_length/mean": LENGTH,
    "critic/rewards/mean": REWARD,
}
"""The metrics, by the names that TRL and verl log."""
METRICS = frozenset(LOGGED.values())

STAYS = 3  # the consecutive records in which a value must be outside its range
EQUAL_STEPS, BY_CHANCE = 5, 1e-6  # the fewest steps with equal rewards, and the largest probability of chance
COLLAPSED, NATS = 0.1, 0.1  # an entropy has collapsed below this fraction of its start, and below this many nats
EXPLODED, FAR = 10.0, 1.0  # the KL has exploded above this multiple of its recent median, and above this many nats
FEW, MOST = 0.75, 0.95  # the fraction of completions at the length limit: at most FEW at first, later at least MOST
_RECENT = 16  # values of the KL


class Sign(NamedTuple):
    """A judged value: rule, step, metric, value, usual value, and whether the value is out of range."""

    rule: str
    step: int
    metric: str
    value: float
    usual: float
    unusual: bool


def metrics_of(names: Iterable[str]) -> dict[str, str]:
    """Map the names of logged series to a policy's metrics."""
    found = {name: LOGGED[plain] for name in names if (plain := name.removeprefix("train/")) in LOGGED}
    # other trainers log an entropy, too
    return found if {EQUAL, REWARD} & {*found.values()} else {}


def logged(step: int, values: Mapping[str, object]) -> list[Row]:
    """Return a policy's numbers from a step's log of TRL or verl."""
    numbers = {metric: values[name] for name, metric in metrics_of(values).items()}
    return [
        Row(step, *MODEL, 0, metric, float(number))
        for metric, number in numbers.items()
        if isinstance(number, int | float) and math.isfinite(number)
    ]


@dataclass(kw_only=True)
class PolicyCourse:
    """The history of a policy's logged numbers."""

    last: int = 0  # the step of the last record, or 0
    begun: int = 0  # the first step of the present series of equal rewards in all groups, or 0 if rewards differ now
    run: int = 0  # the number of consecutive records with equal rewards up to now
    records: int = 0  # the number of earlier records
    equal: float = 0.0  # the number of earlier records with equal rewards
    idle: bool = False  # whether the rewards have been equal for too long to be chance
    first: dict[str, list[float]] = field(default_factory=dict)  # the first values of each metric
    recent: list[float] = field(default_factory=list)  # the last KL values inside the usual range
    # the number of consecutive records outside the usual range, by metric
    outside: dict[str, int] = field(default_factory=dict)

    def see(self, step: int, values: Mapping[str, float]) -> Iterator[Sign]:
        constant = values.get(SPREAD, math.inf) <= 1e-6 * (1.0 + abs(values.get(REWARD, 0.0)))
        if constant or EQUAL in values:  # RLOO adds a KL to the rewards before it compares those of a group
            yield self._equal(step, 1.0 if constant else values[EQUAL])
        for metric in (ENTROPY, KL, CUT):
            if metric in values:
                yield self._level(step, metric, values[metric])
        self.last = step

    def _equal(self, step: int, share: float) -> Sign:
        """Judge the fraction of groups with equal rewards. Equal rewards may be chance if they occurred before."""
        if share < 1.0 - 1e-6:
            self.records, self.equal = self.records + self.run + 1, self.equal + self.run
            self.run = self.begun = 0
            self.idle = False
            return Sign("equal", step, EQUAL, 0.0, 0.0, unusual=False)
        self.begun = self.begun or (self.last + 1 if self.last else step)
        self.run += 1
        covered = step - self.last if self.last else 1
        if not self.records and self.run == 2 and self.begun == self.last:  # the first record tells no interval
            self.begun = max(1, self.last - covered + 1)
        chance = (self.equal + 2.0 * 0.5 ** min(covered, 30)) / (self.records + 2)
        steps = step - self.begun + 1
        rare = self.run * math.log(chance) < math.log(BY_CHANCE)
        self.idle |= self.run >= STAYS and steps >= EQUAL_STEPS and rare
        return Sign("equal", self.begun if self.idle else step, EQUAL, float(steps), 0.0, unusual=self.idle)

    def _level(self, step: int, metric: str, value: float) -> Sign:
        first = self.first.setdefault(metric, [])
        if metric == KL:
            usual = statistics.median(self.recent or [0.0])
            outside = len(self.recent) > STAYS and value > max(FAR, EXPLODED * usual)
            self.recent = self.recent if outside else [*self.recent, value][-_RECENT:]
        elif len(first) < STAYS:
            first.append(value)
            usual, outside = value, False
        else:
            usual = statistics.median(first)
            outside = value < min(NATS, COLLAPSED * usual) if metric == ENTROPY else usual <= FEW and value >= MOST
        self.outside[metric] = self.outside.get(metric, 0) + 1 if outside else 0
        rule = {ENTROPY: "collapse", KL: "drift", CUT: "cut"}[metric]
        return Sign(rule, step, metric, value, usual, unusual=self.outside[metric] >= STAYS)

    def state_dict(self) -> Json:
        return asdict(self)
