"""Judge the training loss by two control charts (CUSUM), one for rises and one for falls."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any, NamedTuple

from lamina.training.monitor.pasts import WINDOW
from lamina.training.monitor.writers import LOSS

LAG, CALM_LOSSES = 8, 16  # how many of the latest losses are judged, and how many before them are needed
LARGEST = 8.0  # a single loss adds at most so many noises, so that no single batch counts as a rise
SLACK = {"rise": 1.0, "fall": 3.0}  # noises that each step may add: more for a fall, as a healthy loss falls
ONE_IN = 10  # where layers are skipped at random, or weights averaged, one in so many losses may be higher
LEAST_NOISE = 0.02  # a loss's noise counts as at least so many nats
LEAST_FALL = 0.5  # nats: a loss of few classes falls from 0.7 in some steps; also how near to chance it may begin


def noise_of(losses: Sequence[float]) -> float:
    """Estimate the standard deviation of the losses' noise from the differences of successive losses."""
    moved = [*map(abs, map(sub, losses[1:], losses))]
    return 1.4826 * statistics.median(moved) / math.sqrt(2) if moved else 0.0


class Chart(NamedTuple):
    """A control chart's sum of distances from the usual loss, in units of the loss's noise."""

    total: float = 0.0
    alarming: bool = False  # whether the sum has passed its limit, and has not been 0 since


@dataclass
class LossChart:
    """The control charts "rise" and "fall" of a run's loss."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))  # the latest losses
    charts: dict[str, Chart] = field(default_factory=dict)  # the two charts after the last loss, by rule

    def see(
        self, loss: float, limits: Mapping[str, float], guess: float, *, varies: bool, learns: bool
    ) -> Iterator[tuple[str, float, float, bool]]:
        """For each chart, yield the rule, the usual loss, the chart's sum, and whether the loss is unusual.

        Args:
            guess: the loss of guessing among all tokens. A fall from this loss is usual, because learning begins.
            varies: whether the model skips layers at random, or the training averages weights.
            learns: whether newly trained parameters make a fall usual.
        """
        before = list(self.losses)[:-LAG]
        if len(before) >= CALM_LOSSES:
            noise = max(noise_of(before), LEAST_NOISE)
            level, earlier = statistics.median(before[-LAG:]), statistics.median(before[-3 * LAG : -LAG] or before)
            learns = learns or level > guess - LEAST_FALL
            latest = sorted(before[-WINDOW:])
            high = latest[-1 - len(latest) // ONE_IN] if varies else statistics.median(latest)
            usually = {"rise": high, "fall": level + min(0.0, level - earlier)}
            for (rule, usual), sign in zip(usually.items(), (1.0, -1.0), strict=True):
                noise = max(noise, abs(level - earlier)) if rule == "fall" else noise
                distance = min(LARGEST, sign * (loss - usual) / noise) - SLACK[rule]
                distance = 0.0 if rule == "fall" and learns else distance
                chart = self.charts.get(rule, Chart())
                total = max(0.0, chart.total + distance)
                unusual = total > limits[f"{rule}/{LOSS}"] or (chart.alarming and total > 0)
                unusual = unusual and (rule == "rise" or usual - loss > LEAST_FALL)
                self.charts[rule] = Chart(total, unusual)
                yield rule, usual, total, unusual
        self.losses.append(loss)

    def is_near(self, guess: float) -> bool:
        """Return whether the latest losses are near the loss of guessing."""
        return abs(statistics.median([*self.losses][-LAG:] or [math.inf]) - guess) < LEAST_FALL

    def state(self) -> list[Any]:
        """Return a checkpoint's entries: the losses, and each rule's chart."""
        sums: dict[str, float] = {}
        for rule, chart in self.charts.items():
            sums |= {rule: chart.total, f"{rule} told": float(chart.alarming)}
        return [list(self.losses), sums]

    def load_state(self, losses: Sequence[float], sums: Mapping[str, float]) -> None:
        self.losses = deque(losses, maxlen=2 * WINDOW)
        self.charts = {rule: Chart(sums[rule], bool(sums[f"{rule} told"])) for rule in SLACK if rule in sums}
