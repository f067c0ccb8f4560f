"""End training steps, check measurements for alarms, and write the measurements.

In a user's loop, measurements come from torch's hooks (``watch.LoopMonitor``). In a run of Lamina, measurements come
from Trainer's callbacks (``recorder.RunRecorder``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from lamina.core.json_types import Json, RunState
from lamina.jobs.seals import grown_records
from lamina.modeling.processes import Processes
from lamina.training.monitor.alarms import Alarm
from lamina.training.monitor.gain_measures import GainSeries
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.trackers import Trackers
from lamina.training.monitor.writers import LOSS, MODEL, NORM, LayersWriter, MetricsWriter, Row

logger = logging.getLogger(__name__)

OnAlarm: TypeAlias = Callable[[Alarm], object]


_CHUNK = 1000  # after this many steps, values are concatenated, so that rare records keep few tensors


class StepSeries:
    """Each step's loss (the mean over micro-batches and processes), and its gradient norm before clipping.

    Only ``rows`` waits for the device. Call ``rows`` in all processes at the same step.
    """

    def __init__(self, processes: Processes | None = None):
        self.processes = Processes() if processes is None else processes
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._steps: dict[str, list[int]] = {LOSS: [], NORM: []}
        self._values: dict[str, list[torch.Tensor]] = {LOSS: [], NORM: []}

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's part of the step's loss. A step's loss is the sum of the added parts."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def add_norm(self, norm: Any) -> None:
        self._norm = torch.as_tensor(norm).detach()

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """End the step. If a loss scaler skipped the step, the step has no norm."""
        for name, value in ((LOSS, self._loss), (NORM, None if skipped else self._norm)):
            if value is not None:
                self._steps[name].append(step)
                self._values[name].append(value.reshape(1).float())
                if len(self._values[name]) >= _CHUNK:
                    self._values[name] = [torch.cat(self._values[name])]
        self._loss = self._norm = None

    def rows(self) -> list[Row]:
        """Return the losses and gradient norms of the steps since the last call."""
        rows: list[Row] = []
        for name in (LOSS, NORM):
            values = torch.cat(self._values[name]).cpu() if self._values[name] else torch.zeros(0)
            if name == LOSS:
                values = torch.stack(self.processes.everyones(values)).double().mean(0)
            rows += [
                Row(step, *MODEL, 0, name, value)
                for step, value in zip(self._steps[name], values.tolist(), strict=True)
            ]
            self._steps[name], self._values[name] = [], []
        return rows


class Writers:
    """The writers of a training's records, in the first process: metrics.jsonl, layers/, and trackers.

    Args:
        rollbacks: the records of the rollbacks so far.
    """

    def __init__(self, folder: Path, report_to: str, rollbacks: Iterable[Mapping[str, Any]] = ()):
        self.folder, self.trackers = folder, Trackers(report_to, folder)
        self.metrics, self.layers = MetricsWriter(folder, rollbacks), LayersWriter(folder)

    def sync(self) -> None:
        """Write all measurements so far to disk."""
        self.layers.flush()
        self.metrics.sync()


@dataclass(kw_only=True, eq=False)
class Monitor:
    """End training steps, check measurements for alarms, and write the measurements.

    Attributes:
        last_loss: the training loss at the last record.
    """

    # the object that writes metrics and layers to files, or None in all processes except the first
    records: Writers | None
    processes: Processes
    guard: DivergenceGuard
    step: int = 0  # the last step that has ended
    # a function that the first process calls with the first alarm of each event (alarms within 20 steps)
    on_alarm: OnAlarm | None = None
    says: ClassVar[str] = ""  # the text before an alarm in the log
    level: ClassVar[int] = logging.INFO  # the level of an alarm in the log

    def __post_init__(self) -> None:
        self.alarms, self.series = self.guard.alarms, StepSeries(self.processes)
        self.gains = GainSeries()
        self.alarms.folder = None if self.records is None else self.records.folder
        self.last_loss: float | None = None
        self._unjudged: list[Row] = []  # losses and norms that are written, but not yet checked for alarms
        self._waiting: list[Row] = []  # the training code's own metrics that are not yet checked

    def _end_step(self, step: int, *, skipped: bool = False) -> None:
        self.step = step
        self.series.end_step(step, skipped=skipped)
        with contextlib.suppress(RuntimeError):  # the gathered weight of a sharded model
            self.gains.end_step(step)

    def look(self, rows: Sequence[Row] = (), rate: float | None = None, *, due: bool = True) -> list[Row]:
        """Check measurements for alarms, and write the measurements. Call this in all processes at the same step.

        Lamina writes measurements of recorded steps, and of steps with an alarm or a notable batch. Returns the losses
        and gradient norms of the steps since the last call.

        Args:
            rows: the measurements since the last call.
            rate: the learning rate, by which Lamina divides updates.
            due: whether the last step is a recorded step.
        """
        unwritten = self.new_steps()
        series, self._unjudged = [*self._unjudged, *unwritten], []
        between = (row for row in self.gains.rows() if not due or row.step != self.step)
        self._judge([*series, *self._waiting, *rows, *between], rate)
        self._waiting = []
        recorded = self.alarms.marked | ({self.step} if due else set())
        self._add([*unwritten, *(row for row in rows if row.step in recorded)])
        self.guard.see_steps(series)
        return series

    def _judge(self, rows: Iterable[Row], rate: float | None = None) -> None:
        """Check measurements for alarms. Report an event's first alarm to the log, the trackers and the user."""
        told = self.alarms.see(rows, rate)
        if self.records is not None and self.alarms.news:
            logger.log(self.level, "%s%s", self.says, self.alarms.news)
            self.records.trackers.alarm(told[0].step, self.alarms.news)
            if self.on_alarm is not None:
                self.on_alarm(told[0])

    def take(self, rows: Sequence[Row]) -> None:
        """Record values that the training code reports for a step, and check them with the step's measurements."""
        self._waiting += rows
        self._add(rows)

    def new_steps(self) -> list[Row]:
        return self.series.rows()

    def _add(self, rows: Sequence[Row]) -> None:
        if self.records is not None and rows:
            self.records.layers.add(rows)
            self.records.trackers.log(self.step, rows)

    def write(self, record: Json) -> None:
        self.last_loss = record.get("loss", self.last_loss)
        if self.records is not None:
            self.records.metrics.write(record)

    def write_divergence(self, diverged: Diverged, tokens: int | None = None) -> None:
        last = {"step": diverged.step, "tokens": tokens, "loss": None}
        self.write({**last, "diverged": diverged.reason, "diverged_since": diverged.since})

    def flush(self) -> None:
        """Write all measurements so far to disk without a check for alarms. Call this in all processes."""
        rows = self.new_steps()
        self._unjudged += rows
        self._add(rows)
        if self.records is not None:
            self.records.sync()

    def state_dict(self) -> Json:
        """Write all measurements to disk, and return the state of alarms and files. Call this in all processes."""
        self.look(due=False)
        if self.records is None:
            return self.alarms.state_dict()
        self.records.sync()
        sealed = {"layer_parts": self.records.layers.next, "records": grown_records(self.records.folder)}
        return {**self.alarms.state_dict(), **sealed}

    def load_state_dict(self, state: RunState) -> None:
        """Restore a checkpoint's alarms, and drop later records."""
        if self.records is not None:
            self.records.metrics.load_state_dict(state)
            self.records.layers.load_state_dict(state)
        self.alarms.load_state_dict(state)
