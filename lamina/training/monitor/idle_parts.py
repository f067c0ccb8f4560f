"""Find experts without tokens, and layers with a gradient or update that falls behind the other layers.

Such idle parts of a model may be harmless, so Lamina writes a note and raises no alarm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.core.json_types import Json
from lamina.training.monitor.writers import Row

Part: TypeAlias = tuple[int, str, int, str]
"""A layer, a sub-layer, an expert and a metric."""

BEHIND = 20.0  # a layer is behind if the ratio of its value to the layers' median fell by this factor
LASTS = {"gradient_norm": 8, "update_norm": 3, "expert_load": 5}  # the consecutive idle values before a note
CERTAIN = 1e-7  # below this probability, an expert without tokens is not due to chance
TOLD = 3  # notes about each metric
_WORDS = {
    "gradient_norm": "relative to the other layers, the gradient of {} fell to less than a twentieth of its earlier "
    "size",
    "update_norm": "relative to the other layers, the update of {} fell to less than a twentieth of its earlier size",
    "expert_load": "the router sends no tokens to {}",
}


@dataclass(kw_only=True)
class IdleParts:
    """Track which parts of a model learn little."""

    runs: dict[Part, int] = field(default_factory=dict)  # the number of consecutive idle values of each part
    named: set[Part] = field(default_factory=set)  # the idle parts that notes have reported
    # each layer's number of zero loads and of all loads, which show how likely a zero load is
    counts: dict[int, list[int]] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)  # the number of notes for each metric

    def see(
        self,
        step: int,
        groups: Iterable[Sequence[Row]],
        loads: Iterable[Row],
        recent: Mapping[tuple[int, str, str, str], Sequence[float]],
    ) -> Iterator[str]:
        """Yield the notes about a step.

        Args:
            groups: the gradients and updates, grouped by kind of sub-layer.
            recent: the last values of each layer's metrics.
        """
        idle = {part for members in groups for part in self._behind(members, recent)} | self._without_tokens(loads)
        new, self.named = idle - self.named, idle | {part for part in self.named if self.runs[part]}
        for metric, words in _WORDS.items() if new else ():
            which = sorted(part for part in new if part[3] == metric)
            if which and self.told.get(metric, 0) < TOLD:
                self.told[metric] = self.told.get(metric, 0) + 1
                names = (
                    f"expert {number} of layer {layer}" if metric == "expert_load" else f"layer {layer} ({sublayer})"
                    for layer, sublayer, number, _ in which
                )
                yield f"step {step}: {words.format(', '.join(names).replace('_', '-'))}. This is no alarm"

    def _lasts(self, row: Row, idle: bool) -> int:
        """Return the number of consecutive idle values of a part, including the value in ``row``."""
        part = _part(row)
        self.runs[part] = self.runs.get(part, 0) + 1 if idle else 0
        return self.runs[part]

    def _behind(
        self, members: Sequence[Row], recent: Mapping[tuple[int, str, str, str], Sequence[float]]
    ) -> Iterator[Part]:
        """Yield the layers with a value that fell by the factor ``BEHIND`` relative to the layers' median."""
        usual = statistics.median(row.value for row in members) if len(members) > 2 else 0.0
        past: list[float] = []  # each member's median, computed only if a member is small
        before = 0.0
        for at, row in enumerate(members):
            idle = 0 < row.value < usual / 2
            if idle:
                if not past:
                    past = [statistics.median(recent.get((*each.location, each.metric)) or [0.0]) for each in members]
                    before = statistics.median(past)
                idle = row.value * before * BEHIND < past[at] * usual
            if self._lasts(row, idle) >= LASTS[row.metric]:
                yield _part(row)

    def _without_tokens(self, loads: Iterable[Row]) -> set[Part]:
        """Return the experts that got no tokens for longer than chance explains."""
        idle, rows = set[Part](), list(loads)
        for row in rows:
            before = self.runs.get(_part(row), 0)
            if not self._lasts(row, row.value == 0.0):
                count = self.counts.setdefault(row.layer, [0, 0])
                count[:] = [count[0] + before, count[1] + before + 1]
        for row in rows:
            zeros, seen = self.counts.get(row.layer, (0, 0))
            run = self.runs[_part(row)]
            if run >= LASTS[row.metric] and run * math.log((zeros + 1) / (seen + 2)) < math.log(CERTAIN):
                idle.add(_part(row))
        return idle

    def state_dict(self) -> Json:
        return {
            "runs": [[*part, run] for part, run in self.runs.items() if run],
            "named": sorted(map(list, self.named)),
            "counts": [[layer, *counts] for layer, counts in self.counts.items()],
            "told": self.told,
        }

    def load_state_dict(self, state: Json) -> None:
        self.runs = {
            (layer, sublayer, number, metric): run for layer, sublayer, number, metric, run in state.get("runs", [])
        }
        self.named = {(layer, sublayer, number, metric) for layer, sublayer, number, metric in state.get("named", [])}
        self.counts = {layer: counts for layer, *counts in state.get("counts", [])}
        self.told = dict(state.get("told", {}))


def _part(row: Row) -> Part:
    return row.layer, row.sublayer, row.number, row.metric
