"""The monitor of a watched training: its measurements, its reactions, and its folder."""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

import torch

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json, write_yaml
from lamina.jobs.folder import Resume, hold, in_use
from lamina.jobs.kinds import Kind
from lamina.jobs.names import CONFIG, ENVIRONMENT, RESULT
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.status import Status
from lamina.modeling.processes import Processes
from lamina.training.monitor.alarms import Alarm, Alarms, events
from lamina.training.monitor.guard import Diverged, DivergenceGuard, OutlierRule
from lamina.training.monitor.parameter_measures import tables_of
from lamina.training.monitor.trackers import Trackers
from lamina.training.monitor.training_hooks import Instruments
from lamina.training.monitor.writers import (
    LOSS,
    NORM,
    VERSION,
    WATCHED,
    LayersWriter,
    MetricsWriter,
    Row,
    StepSeries,
    WatchSettings,
    read_about,
    spike_columns,
)

logger = logging.getLogger(__name__)

OnAlarm: TypeAlias = Callable[[Alarm], object]


class WatchedRecords:
    """metrics.jsonl, layers/, alarms.jsonl, watched.json and result.json of one run.

    Args:
        resume: whether to continue the folder's records after ``step``; "auto": if there are any.
        step: the last step that was done before.

    Raises:
        UserError: for a folder in use, or one whose records are of another version.
    """

    def __init__(self, settings: WatchSettings, *, resume: Resume = False, overwrite: bool = False, step: int = 0):
        self.folder = Path(settings.output)
        if resume and in_use(self.folder):
            read_about(self.folder)  # refuses records of another version
            RunFolder(self.folder).require_records()
        self.trackers = Trackers(settings.report_to, self.folder)  # refuses one that is not installed
        with ExitStack() as held:
            held.enter_context(hold(self.folder, resume=resume, overwrite=overwrite))
            write_json(self.folder / ENVIRONMENT, environment(0, Kind.WATCHED))
            write_yaml(self.folder / CONFIG, settings.to_dict())
            self.metrics, self.layers = MetricsWriter(self.folder), LayersWriter(self.folder)
            self.alarms = Alarms(folder=self.folder)
            for part in (self.metrics, self.layers, self.alarms):
                part.load_state_dict({"step": step})
            self._held = held.pop_all()
        self.last_loss: float | None = None

    def write(self, record: Json) -> None:
        """Write a line of metrics.jsonl."""
        self.metrics.write(record)
        self.last_loss = record.get("loss", self.last_loss)

    def close(self, result: Json) -> None:
        """Write what was collected and result.json, and leave the folder."""
        try:
            self.layers.flush()
            self.metrics.sync()
            self.alarms.close()
            alarms = len(events(self.alarms.told))
            result = {**result, "loss": self.last_loss, "alarms": alarms, **spike_columns(self.folder)}
            write_json(self.folder / RESULT, result)
            self.trackers.close()
        finally:
            self._held.close()


class Monitor:
    """Measures a training run, step by step, and writes its records; made by ``lamina.watch`` or ``LayerMonitor``.

    Args:
        instruments: on the model and its optimizers.
        records: of the first process; None in the others.
        step: the last step that was done before.
        on_alarm: called in the first process with the first alarm of each event.
    """

    def __init__(
        self,
        instruments: Instruments,
        records: WatchedRecords | None,
        processes: Processes,
        *,
        step: int = 0,
        on_alarm: OnAlarm | None = None,
    ):
        self.on_alarm, self._told = on_alarm, False  # whether anybody ends the steps
        settings = instruments.settings
        self.instruments, self.settings = instruments, settings
        self.records, self.processes, self.step = records, processes, step
        self.alarms = Alarms() if records is None else records.alarms
        self.guard = DivergenceGuard(
            margin=settings.divergence_margin, patience=settings.divergence_patience, alarms=self.alarms
        )
        self.series = StepSeries(processes)
        self.outliers = None if settings.skip_outliers is None else OutlierRule(sigmas=settings.skip_outliers)
        self.diverged: Diverged | None = None
        self.skipped = 0
        self._broken: set[str] = set()  # series of a noted divergence, until they are finite again
        self._micro: list[torch.Tensor] = []  # losses of the step's micro-batches
        self._losses: list[float] = []
        self._held = ExitStack()
        self._begun = self._since = time.monotonic()
        self._tokens_written = self.tokens
        self._about: Json = {}  # as written last
        self._open = False

    @property
    def is_due(self) -> bool:
        """Whether the step that comes next is recorded."""
        return self.step == 0 or (self.step + 1) % self.settings.every == 0

    @property
    def tokens(self) -> int:
        """The tokens of all steps so far and of all processes, those of an earlier session included."""
        before = 0 if self.records is None else self.records.metrics.tokens_before
        return before + self.instruments.tokens * self.processes.size

    def begin(self) -> None:
        """Attach to model and optimizers."""
        self._open = True
        judge = None if self.outliers is None else self._is_outlier
        self._held.enter_context(self.instruments.attached(judge, self._describe, self._end_untold))
        self.instruments.due, self.instruments.resumed = self.is_due, self.step > 0

    def _describe(self) -> None:
        """Write watched.json if it has changed since the layers were looked for, and log what is not recorded."""
        if (followed := self.instruments.followed) is None:
            return
        if followed.structure is not None:
            self.guard.paths = {site.index: site.path for site in followed.structure.layers}
            self.alarms.vocabulary = max(map(len, tables_of(followed.structure).values()), default=None)
        if self.records is None:
            return
        notes = followed.notes
        for note in notes[len(self._about.get("notes", [])) :]:
            logger.warning("lamina.watch: %s", note)
        if (about := self.instruments.about()) != self._about:
            self._about = {**about, "notes": list(notes)}
            write_json(self.records.folder / WATCHED, {"record": VERSION, **about})

    def _is_outlier(self, norm: torch.Tensor) -> bool:
        """Return whether to skip the coming step; waits for the device."""
        assert self.outliers is not None
        skips = self.outliers.see(NORM, float(norm))
        if (loss := self.instruments.step_loss()) is not None:
            skips |= self.outliers.see(LOSS, self.processes.mean(float(loss)))
        skips = self.processes.anyone(skips)
        self.skipped += skips
        return skips

    def end_step(self, loss: torch.Tensor | float | None = None) -> None:
        """End a step, after the optimizer's, or a micro-batch of accelerate's ``accumulate``.

        Raises Diverged where the run should stop, and UserError for a loss that is not one number.
        """
        self._told = True
        if not self._open:
            return
        if loss is not None:
            self._micro.append(_number(loss))
        if not self.instruments.accumulates:
            self._end()

    def _end_untold(self) -> None:
        """End a step of a loop that never says where its steps end. Raises Diverged."""
        if self._open and not self._told and self.instruments.ended:
            self._end()

    def _end(self) -> None:
        self.step += 1
        taken = self.instruments.end_step(self.step)
        due = self.instruments.due or taken.measured
        losses, self._micro = self._micro, []
        if (loss := torch.stack(losses).mean() if losses else taken.loss) is not None:
            self.series.add_loss(loss)
        self.series.add_norm(taken.norm if taken.norm is not None else math.nan)
        self.series.end_step(self.step, skipped=taken.norm is None or not taken.stepped)
        try:
            if due or (self.processes.size == 1 and self.instruments.on_cpu):
                self._look(due, taken.rate)
        except Diverged as diverged:
            self._act(diverged)
        finally:
            self.instruments.due = self.is_due

    def _look(self, due: bool, rate: float | None) -> None:
        """Read what the steps since the last time have shown; record, if it is due. Raises Diverged.

        ``rate``: the learning rate of the step that has ended.
        """
        gradients, series = self.instruments.gradient_rows(), self._series_rows()
        new = self.instruments.rows(self.step, self.processes) if due else self.instruments.written_rows(self.step)
        if due:
            self._describe()
            new += [(self.step, -1, "model", "all", 0, "learning_rate", rate)] if rate is not None else []
        self.alarms.half = self.instruments.half  # autocast may have been seen
        self._see([*series, *gradients, *new], rate)
        recorded = self.alarms.marked | ({self.step} if due else set())
        self._add([*series, *(row for row in (*gradients, *new) if row[0] in recorded)])
        self._losses += [row[6] for row in series if row[5] == LOSS]
        if due:
            self._write(rate)
        for step, _, _, _, _, metric, value in series:
            if math.isfinite(value):
                self._broken.discard(metric)
            elif metric in self._broken:
                continue  # noted where it began
            elif self.settings.on_divergence == "note":
                self._broken = {LOSS, NORM}
            if metric == LOSS:
                self.guard.see_loss(step, value)
            else:
                self.guard.see_gradient(step, value)

    def _see(self, rows: Sequence[Row], rate: float | None = None) -> None:
        """Judge new rows; tell the log, the trackers and the user of an event that begins, with its first alarm."""
        told = self.alarms.see(rows, rate)
        if self.records is None or not self.alarms.news:
            return
        logger.warning("lamina.watch: %s", self.alarms.news)
        self.records.trackers.alarm(told[0].step, self.alarms.news)
        if self.on_alarm is not None:
            self.on_alarm(told[0])

    def _series_rows(self) -> list[Row]:
        """Loss and gradient norm of the steps since the last call; a step that a loss scaler left out has no norm."""
        scaled = self.instruments.scales_losses
        return [row for row in self.series.rows() if not scaled or row[5] != NORM or math.isfinite(row[6])]

    def _write(self, rate: float | None) -> None:
        now, tokens = time.monotonic(), self.tokens
        record: Json = {"step": self.step, "tokens": tokens}
        if self._losses:
            record["loss"] = math.fsum(self._losses) / len(self._losses)
        self._losses = []
        record |= {"learning_rate": rate, "grad_norm": self.instruments.last_norm}
        seconds, new = max(now - self._since, 1e-9), tokens - self._tokens_written
        self._since, self._tokens_written = now, tokens
        if self.records is not None:
            self.records.write({**record, "tokens_per_second": new / seconds})

    def _add(self, rows: Sequence[Row]) -> None:
        if self.records is not None and rows:
            self.records.layers.add(rows)
            self.records.trackers.log(self.step, rows)

    def _act(self, diverged: Diverged) -> None:
        """React to a divergence as the settings say. Raises Diverged if the run should stop."""
        if self.processes.first:
            logger.warning("lamina.watch: diverged: %s", diverged)
        if self.records is not None:
            self.records.write({"step": diverged.step, "tokens": None, "loss": None, "diverged": diverged.reason})
        self.diverged = self.diverged or diverged
        if self.settings.on_divergence == "stop":
            raise diverged
        self.guard.accept()

    def close(self, status: Status, reason: str = "") -> None:
        """Detach, and write what was collected; may be called twice."""
        if not self._open:
            return
        # The others may have left, or a loop may have ended the processes' group before the process ends.
        together = self.processes.size == 1 or (status is Status.FINISHED and torch.distributed.is_initialized())
        if status is Status.FINISHED and together:
            with suppress(Diverged):  # ``diverged`` has it
                self._end_untold()
        self._open = False
        self._held.close()
        if self.diverged is not None and status in (Status.FINISHED, Status.INTERRUPTED):
            status, reason = Status.DIVERGED, self.diverged.reason
        if together:
            rows = self._series_rows()
            self._see(rows)
            self._add(rows)
        if self.records is not None:
            seconds = time.monotonic() - self._begun
            new = self.instruments.tokens * self.processes.size
            result: Json = {"status": str(status), "reason": reason, "steps": self.step, "tokens": self.tokens}
            result |= {"seconds": seconds, "tokens_per_second": new / seconds if seconds else None}
            result |= {"parameters": self.instruments.parameters, "skipped": self.skipped}
            self.records.close(result)


def _number(loss: object) -> torch.Tensor:
    """Return a step's loss as a scalar; nothing waits for the device."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()).float()
    if isinstance(loss, numbers.Real):
        return torch.tensor(float(loss))
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise UserError(f"loss: {what} (allowed: one number, the mean over the step's batch)")
