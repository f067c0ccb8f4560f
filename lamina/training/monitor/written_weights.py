"""Judge changes that no optimizer made to weights or to an optimizer's moments."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.training.monitor.pasts import Judgment
from lamina.training.monitor.writers import MODEL, RATE, Location, Row

HANDS = ("written_ratio", "forgotten_share")
# A change of weights below this fraction of the weights, or below this multiple of the usual change, may be the
# loop's own normalization or averaging.
WRITTEN, OWN_WAY = 0.02, 3.0
FORGOTTEN = 0.5  # if more than this fraction of the optimizer's moments is lost, the optimizer was reset
HABIT, RECORDS = 0.3, 3  # up to this fraction, a change is usual if the loop changed the weights in the last 3 records
# A change counts as averaged weights, or as a return to earlier ones, if this fraction of the trained parts changes
# together, by this multiple of the distance since the last change. Momentum (DiLoCo) carries earlier distances on.
MEANS, REACH, MOMENTUM = 0.8, 1.5, 0.9
JUMP = 0.1  # if averaging changes more than this fraction of the weights, earlier measurements no longer count
RESTARTED = 2.0  # the factor by which the learning rate changes in a restart
AVERAGED = (
    "code other than the optimizer changed all weights, by about as much as the optimizer had changed them before "
    "(look-ahead, DiLoCo, weight averages, a loaded checkpoint). Lamina raises no alarm for such a change"
)
RESTARTS = (
    "the optimizer's moments were reset, and the learning rate jumped (a warm restart, ReLoRA). Lamina "
    "raises no alarm for such a restart, and compares later steps only with steps after the restart"
)


class LastWeights(NamedTuple):
    """The norms of a part's weights and of their update at the last record, and the record's step."""

    step: int
    norm: float
    update: float


@dataclass
class WrittenWeights:
    """Judge a run's changed weights and lost moments, one step after another."""

    means: int = 0  # the number of steps so far at which code other than the optimizer changed almost all weights
    total: float = 0.0  # the sum of the ``written_ratio`` of all parts at the last step
    rate: float | None = None  # the last known learning rate, or None
    restarts: bool = False  # whether the optimizer restarted at the last step (lost moments, and a new learning rate)
    # whether past measurements no longer count, because weights were replaced or the optimizer restarted
    elsewhere: bool = False
    note: str = ""  # the text of this step's note, or ""
    # for each part of the model, a decaying sum of the distances that the optimizer moved the weights before other code
    # changed them
    carried: dict[Location, float] = field(default_factory=dict)

    def see(
        self,
        step: int,
        rows: Sequence[Row],
        weights: Mapping[Location, LastWeights],
        recent_of: Callable[[Row], deque[float]],
        several: float,
        rate: float | None,
    ) -> Iterator[Judgment]:
        """Judge the changes of weights and the lost moments at a step.

        A change is usual if other code made similar changes at earlier records. If many parts change together, the
        training may average the weights with other models. Such a change is unusual only if it exceeds the optimizer's
        updates since the last record.

        Args:
            recent_of: a function that returns the last values of the same metric and layer.
            several: the number of changed parts above which Lamina says that many parts changed together.
            rate: the step's learning rate, or None.
        """
        self.elsewhere, self.note = False, ""
        finite = (row for row in rows if row.metric in {*HANDS, "moved_ratio"} and math.isfinite(row.value))
        of = {(row.location, row.metric): row for row in finite}
        written_now = {row.location: row.value for row in of.values() if row.metric == "written_ratio"}
        recorded = any(row.metric == "update_norm" for row in rows)
        trained = [place for place, last in weights.items() if last.update > 0]
        whole_way = sum(place in written_now for place in trained) >= max(2, MEANS * len(trained))
        again, self.total = whole_way and sum(written_now.values()) != self.total, sum(written_now.values())
        self.means += again

        shares = (row.value for row in of.values() if row.metric == "forgotten_share")
        lost = sorted(share for share in shares if share > FORGOTTEN)
        many_lost = len(lost) > several
        before, jumped = self.restarts, self._jumps(next((row.value for row in rows if row.metric == RATE), rate))
        self.restarts = restarts = many_lost and (before or jumped)
        many = sum(share > WRITTEN for share in written_now.values()) > several
        averaged, found = False, list[Judgment]()
        for place, last in weights.items() if recorded or of else ():
            written, share = (of.get((place, name), Row(step, *place, 0, name, 0.0)) for name in HANDS)
            found.append(Judgment("forgotten", share, 0.0, share.value > FORGOTTEN and not many_lost))
            recent = recent_of(written)
            could = (step - last.step) * last.update / last.norm if many and last.norm else 0.0
            usual = max(_usual(recent), could)
            if whole_way and (back := of.get((place, "moved_ratio"))) is not None:
                if again:
                    self.carried[place] = back.value + MOMENTUM * self.carried.get(place, 0.0)
                usual = max(usual, REACH * max(back.value, self.carried.get(place, 0.0)))
                averaged |= written.value > WRITTEN
            unusual = last.update > 0 and written.value > usual and not restarts
            found.append(Judgment("written", written, usual, unusual))
            if recorded:
                recent.append(written.value)
        way_back = averaged and not any(each.unusual for each in found)
        if recorded or lost:
            whole = Row(step, *MODEL, 0, "forgotten_share", lost[-1] if lost else 0.0)
            yield Judgment("forgotten", whole, 0.0, many_lost and not restarts and not way_back)
        yield from found
        self.elsewhere = (restarts and not before) or (averaged and again and max(written_now.values()) > JUMP)
        self.note = RESTARTS if restarts else AVERAGED if averaged else ""

    def _jumps(self, rate: float | None) -> bool:
        """Return whether the learning rate has at least doubled or halved since the last step."""
        factor = rate / self.rate if rate and self.rate else 1.0
        self.rate = rate or self.rate
        return not 1 / RESTARTED < factor < RESTARTED


def _usual(recent: Sequence[float]) -> float:
    """Return the relative change that other code usually makes to a part's weights, from the last records."""
    events = [value for value in recent if value > 0]
    usual = OWN_WAY * statistics.median(events if len(events) > 1 else recent or [math.inf])
    habit = len(recent) >= RECORDS and all([*recent][-RECORDS:])
    return max(WRITTEN, usual, HABIT if habit else 0.0)
