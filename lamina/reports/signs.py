"""Find the signs of a failure in a run's records, and the alarm that explains the failure best."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lamina.core.json_types import Json
from lamina.training.monitor.alarms import FOLLOWS, Alarm, first_before, place_of
from lamina.training.monitor.first_anomaly import first_anomaly


@dataclass(frozen=True, kw_only=True)
class Signs:
    """The observations in a run's records from which Lamina infers a cause."""

    alarms: tuple[Alarm, ...]  # the alarms, oldest first. Within a step, the alarm that explains most comes first
    rose: int | None  # the first step at which the loss rose and stayed up, or was not finite, or None
    losses: Mapping[int, float] = field(default_factory=dict)  # the training loss by step
    rates: Mapping[int, float] = field(default_factory=dict)  # the learning rate by step
    norms: Mapping[int, float] = field(default_factory=dict)  # the norm of the whole model's gradient by step
    half: bool | None = False  # whether the model computes in float16, or None if unknown
    # the record's number at each step, if the records have gaps. Lamina then counts records, not steps
    clock: Mapping[int, int] = field(default_factory=dict)
    view: str = ""  # the kind of another tool's record (``VIEWS``), or "" for Lamina's records
    # the run's settings, from config.yaml or from the training that Lamina watched
    settings: Json = field(default_factory=dict)

    def holds(self, metric: str) -> bool:
        """Return whether the records can contain a metric."""
        return True

    @cached_property
    def counted(self) -> Signs:
        """Return the same signs with record numbers instead of steps."""
        if not self.clock:
            return self
        steps = sorted(self.clock)
        numbers = {step: bisect_right(steps, step) for step in {*steps, *self.losses, *self.rates, *self.norms}}
        return replace(
            self,
            alarms=tuple(replace(alarm, step=bisect_right(steps, alarm.step)) for alarm in self.alarms),
            rose=None if self.rose is None else bisect_right(steps, self.rose),
            losses={numbers[step]: loss for step, loss in self.losses.items()},
            rates={numbers[step]: rate for step, rate in self.rates.items()},
            norms={numbers[step]: norm for step, norm in self.norms.items()},
            clock={},
        )

    @cached_property
    def first(self) -> Alarm | None:
        """Return the alarm that explains the failure best (see ``first_anomaly``), or None."""
        of = self.counted
        first = first_anomaly(of.alarms, of.rose, of.losses, of.norms)
        return None if first is None else self.alarms[of.alarms.index(first)]

    @property
    def passed_spike(self) -> Alarm | None:
        """Return the first alarm of a loss spike that ended before the first anomaly, or None."""
        before = first_before(self.counted.alarms, self.counted.rose)
        alarm = None if before is None else self.alarms[self.counted.alarms.index(before)]
        passed = alarm is not None and self.first is not None and self.first.step > alarm.step + FOLLOWS
        return alarm if passed else None

    @cached_property
    def place(self) -> Alarm | None:
        """Return the alarm that shows the location of the fault best (see ``place_of``), or None."""
        if self.first is None:
            return None
        of = self.counted
        return self.alarms[of.alarms.index(place_of(of.alarms, of.alarms[self.alarms.index(self.first)]))]
