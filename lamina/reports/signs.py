"""Find a failure's signs in a run's records, and the alarm that explains most."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lamina.reports.loss_course import calm_steps
from lamina.training.monitor.alarms import (
    FOLLOWS,
    Alarm,
    events,
    first_before,
    is_independent,
    is_spike,
    outlasts_spikes,
    place_of,
)
from lamina.training.monitor.rules import GRADIENTS

HARD = ("not_finite", "dead", "written", "unmoved")  # the alarms of these rules are the failure itself
TWICE = 2.0  # a gradient is back from a spike if its norm is at most so many times its norm before


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
        """Return the alarm that explains most (``first_before``), outside of spikes that passed.

        If a gradient has risen, and an independent alarm or an alarm of a rule in ``HARD`` follows soon, Lamina takes
        the later alarm.
        """
        of = self.counted
        first = first_before(of.alarms, of.rose)
        if first is None:
            return None
        first = next((group[0] for group in of.lasting if group[-1].step >= first.step), first)
        if first.metric in GRADIENTS and first.rule == "rise":
            soon = range(first.step, first.step + FOLLOWS + 1)
            near = [alarm for alarm in of.alarms if alarm.step in soon]
            first = next((alarm for alarm in near if alarm.rule in HARD or is_independent(alarm)), first)
        return self.alarms[of.alarms.index(first)]

    @property
    def passed_spike(self) -> Alarm | None:
        """Return the first alarm of a spike that passed before the first anomaly, or None."""
        before = first_before(self.counted.alarms, self.counted.rose)
        alarm = None if before is None else self.alarms[self.counted.alarms.index(before)]
        passed = alarm is not None and self.first is not None and self.first.step > alarm.step + FOLLOWS
        return alarm if passed else None

    @property
    def lasting(self) -> list[list[Alarm]]:
        """Return the alarms grouped into events, without spikes that passed.

        An alarm that a passed spike cannot explain (``outlasts_spikes``) begins a new event.
        """
        groups: list[list[Alarm]] = []
        for group in events(self.alarms):
            at = next((number for number, alarm in enumerate(group) if outlasts_spikes(alarm)), 0)
            groups += (group[:at], group[at:]) if self._passed(group[:at], group[at].step) else (group,)
        ends = [*(group[0].step for group in groups[1:]), max(self.losses, default=0) + 1]
        return [group for group, end in zip(groups, ends, strict=True) if not self._passed(group, end)]

    def _passed(self, alarms: Sequence[Alarm], end: int) -> bool:
        """Return whether the alarms belong to a spike, and the loss and the gradient came back down before ``end``."""
        if not alarms or not is_spike(alarms):
            return False
        begin, between = alarms[0].step, range(alarms[-1].step + 1, end)
        of_losses, of_norms = self.sorted_steps
        calm = calm_steps(self.losses, of_losses, begin, between)
        if self.norms or any(alarm.metric in GRADIENTS for alarm in alarms):
            calm &= calm_steps(self.norms, of_norms, begin, between, times=TWICE)
        return bool(calm)

    @cached_property
    def sorted_steps(self) -> tuple[list[int], list[int]]:
        """The sorted steps of the losses and of the norms."""
        return sorted(self.losses), sorted(self.norms)

    @cached_property
    def place(self) -> Alarm | None:
        """Return the alarm that shows the fault's location (``place_of``)."""
        if self.first is None:
            return None
        of = self.counted
        return self.alarms[of.alarms.index(place_of(of.alarms, of.alarms[self.alarms.index(self.first)]))]
