"""Monitor a user's training loop with `lamina.watch`."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import numbers
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from lamina.core.json_types import Json
from lamina.core.terminal import show_error, show_line
from lamina.errors import UserError, is_reported, mark_reported, one_line
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json, write_sealed
from lamina.jobs.folder import Resume, clear, hold, in_use
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.names import CONFIG, ENVIRONMENT, RESULT
from lamina.jobs.run_folder import RunFolder, trainings
from lamina.jobs.seals import refuse_altered, write_result
from lamina.jobs.status import Status
from lamina.modeling.processes import Processes
from lamina.training.monitor.alarms import Alarms, events
from lamina.training.monitor.batches import BatchRecords, Tokenizer
from lamina.training.monitor.followed import Inputs
from lamina.training.monitor.gain_measures import tables_of
from lamina.training.monitor.guard import Diverged, DivergenceGuard, OutlierRule
from lamina.training.monitor.mistakes import BeforeTraining, findings
from lamina.training.monitor.monitor import Monitor, OnAlarm, Writers
from lamina.training.monitor.stages import processes_of
from lamina.training.monitor.trackers import installed
from lamina.training.monitor.training_hooks import GROWTH, Instruments
from lamina.training.monitor.writers import (
    LOSS,
    MODEL,
    NORM,
    RATE,
    VERSION,
    WATCHED,
    Row,
    WatchSettings,
    read_about,
    spike_columns,
)

logger = logging.getLogger(__name__)
_IN_A_ROW = 8  # after this many skipped steps, a value that is not finite is a divergence


class WatchedRecords(Writers):
    """The records of a watched training in ``folder``, with its settings, watched.json and result.json.

    Args:
        resume: whether to continue the folder's records after ``step``. "auto" continues existing records.
        step: the last step before training began or resumed.

    Raises:
        UserError: the folder has files, or records of another version of Lamina.
    """

    def __init__(self, settings: WatchSettings, folder: Path, *, resume: Resume, overwrite: bool, step: int):
        if resume and in_use(folder):
            read_about(folder)  # rejects records of another version
            RunFolder(folder).require_records()
            refuse_altered(folder)
        installed(settings.report_to)  # rejects trackers that are not installed
        with ExitStack() as held:
            continues = held.enter_context(hold(folder, resume=resume, overwrite=overwrite, flag="{}=True"))
            write_json(folder / ENVIRONMENT, environment(0, Kind.WATCHED))
            (folder / RESULT).unlink(missing_ok=True)
            write_sealed(folder / CONFIG, settings.to_dict())
            super().__init__(folder, settings.report_to)
            self.alarms = Alarms(folder=folder)
            for part in (self.metrics, self.layers, self.alarms):
                part.load_state_dict({"step": step})
            if continues and (last := self.layers.last_step()) < step:
                logger.warning(
                    "lamina.watch: the records by layer of steps %d to %d are missing in %s, because the training was "
                    "killed",
                    *(last + 1, step, folder),
                )
            self._held = held.pop_all()

    def close(self, result: Json) -> None:
        """Write the last measurements and result.json, and release the folder. If no step ended, empty the folder."""
        with self._held:
            self.sync()
            self.alarms.close()
            alarms = len(events(self.alarms.told))
            write_result(self.folder, {**result, "alarms": alarms, **spike_columns(self.folder)})
            self.trackers.close()
            if not result["steps"]:
                clear(self.folder)


def folder_for(settings: WatchSettings, *, resume: Resume, overwrite: bool) -> Path:
    """Return the folder of the records: ``output`` or, if an earlier training has records there, NAME-2, NAME-3, ...

    With ``resume``, return the folder of the last training. With ``overwrite``, always return ``output``.
    """
    folder = Path(settings.output)
    if overwrite or folder.name in ("", "..") or not (in_use(folder) and kind_of(folder) == Kind.WATCHED):
        return folder
    if resume:
        return (trainings(folder) or [folder])[-1]
    free = next(path for number in count(2) if not (path := folder.with_name(f"{folder.name}-{number}")).exists())
    logger.warning("lamina.watch: %s holds the records of an earlier training, so Lamina writes to %s", folder, free)
    return free


class LoopMonitor(Monitor):
    """The monitor of a user's training loop.

    Args:
        instruments: the hooks that measure the model and the optimizers.
        records: the object that writes the records in the first process, or None in all other processes.
        step: the last step before training began or resumed.
    """

    says, level = "lamina.watch: ", logging.WARNING

    def __init__(
        self,
        instruments: Instruments,
        records: WatchedRecords | None,
        processes: Processes,
        *,
        step: int = 0,
        on_alarm: OnAlarm | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        settings = instruments.settings
        guard = DivergenceGuard(
            margin=settings.divergence_margin,
            patience=settings.divergence_patience,
            alarms=Alarms() if records is None else records.alarms,
        )
        super().__init__(records=records, processes=processes, guard=guard, step=step, on_alarm=on_alarm)
        self.instruments, self.settings, self.gains = instruments, settings, instruments.gains
        folder, self.batches = None if records is None else records.folder, None
        if instruments.batches is not None:
            self.batches = BatchRecords(instruments.batches, folder, step, tokenizer, instruments.model)
        self.outliers = None if settings.skip_outliers is None else OutlierRule(sigmas=settings.skip_outliers)
        self.diverged: Diverged | None = None
        self.raised: Diverged | None = None  # the last divergence that ended the loop
        self.shows = False  # whether the end of the process shows the divergence
        self._passed: set[int] = set()  # steps that skip_outliers skipped
        self._told = False  # whether the loop calls ``monitor.step``
        self._broken: set[str] = set()  # the metrics of a noted divergence, until their values are finite again
        self._rate: tuple[float | None, bool] = None, False  # the last step's learning rate, and whether it is recorded
        self._micro: list[torch.Tensor] = []  # losses of the step's micro-batches
        self._losses: list[float] = []
        self._held = ExitStack()
        self._begun = self._since = time.monotonic()
        self._tokens_written = self.tokens
        self._about: Json = {}  # the last content of watched.json
        self._open = False

    @property
    def is_due(self) -> bool:
        return self.step == 0 or (self.step + 1) % self.settings.every == 0

    @property
    def tokens(self) -> int:
        """The number of tokens of all steps and processes so far, including earlier sessions."""
        before = 0 if self.records is None else self.records.metrics.tokens_before
        return before + self.instruments.tokens * self.processes.size

    def begin(self) -> None:
        self._open = True
        judge = None if self.outliers is None else self._is_outlier
        self._held.enter_context(self.instruments.attached(judge, self._describe, self._end_untold, self._leave))
        self.instruments.due, self.instruments.resumed = self.is_due, self.step > 0

    def _describe(self, batch: Inputs | None = None) -> None:
        """Write watched.json if its content has changed, and log new notes. Check the first batch for mistakes."""
        if (followed := self.instruments.followed) is None:
            return
        if batch is not None and self.step == 0:
            setup = BeforeTraining(
                model=self.instruments.model, optimizers=self.instruments.optimizers, batch=batch, running=True
            )
            setup.structure = followed.structure
            for finding in findings(setup):
                self.instruments.note(f"check: {finding}")
            for name, error in setup.failed.items():
                self.instruments.note(f"check: not checked: {name}: {error}")
        if followed.structure is not None:
            self.alarms.paths = {site.index: site.path for site in followed.structure.layers}
            self.alarms.starts, self.alarms.kinds = followed.structure.starts, followed.structure.kinds()
            self.alarms.vocabulary = max(map(len, tables_of(followed.structure).values()), default=None)
        if self.records is None:
            return
        for note in self.alarms.notes:
            self.instruments.note(note)
        notes = followed.notes
        for note in notes[len(self._about.get("notes", [])) :]:
            logger.warning("lamina.watch: %s", note)
        if (about := self.instruments.about()) != self._about:
            if not self._about:
                self._announce(about)
            self._about = {**about, "notes": list(notes)}
            write_json(self.records.folder / WATCHED, {"record": VERSION, **about})

    def _announce(self, about: Json) -> None:
        """Log one line about the records. Print the line if logging is not configured."""
        layers = f"{about['num_layers']} layers, " * bool(about["num_layers"])
        folder = shlex.quote(str(self.folder))
        text = (
            f"lamina.watch: recording {about['model']} ({layers}{about['parameters']:,} parameters) in {folder}. "
            f"To read the records, run: lamina diagnose {folder}"
        )
        logger.setLevel(logging.getLogger("lamina").level or logging.INFO)
        if logger.hasHandlers():
            logger.info("%s", text)
        elif logger.isEnabledFor(logging.INFO):
            show_line(text)

    def _is_outlier(self, norm: torch.Tensor) -> bool:
        """Return whether to skip the next optimizer step. The call waits for the device."""
        assert self.outliers is not None
        skips = self.outliers.see(NORM, float(norm))
        if (loss := self.instruments.step_loss()) is not None:
            skips |= self.outliers.see(LOSS, self.processes.mean(float(loss)))
        skips = self.processes.anyone(skips)
        self._passed |= {self.step + 1} if skips else set()
        return skips

    def end_step(self, loss: torch.Tensor | float | None = None) -> None:
        """End an optimizer step, or a micro-batch under accelerate's ``accumulate``.

        Raises Diverged if the run should stop, and UserError for a loss that is not a single number.
        """
        self._told = True
        if not self._open:
            return
        if loss is not None:
            self._micro.append(_number(loss))
        if not self.instruments.accumulates:
            self._end()

    def _end_untold(self) -> None:
        """End a step of a loop that does not call ``monitor.step``. Raises Diverged."""
        if self._open and not self._told and self.instruments.now.ended:
            self._end()

    def _end(self) -> None:
        step = self.step + 1
        taken = self.instruments.end_step(step)
        due = self.instruments.due or taken.measured
        losses, self._micro = self._micro, []
        if (loss := torch.stack(losses).mean() if losses else taken.loss) is not None:
            self.series.add_loss(loss)
        self.series.add_norm(taken.norm if taken.norm is not None else math.nan)
        self._end_step(step, skipped=taken.norm is None or not taken.stepped)
        (before, recorded), (rate, self._rate) = self._rate, (taken.rate, (taken.rate, due))
        if rate and before and not 1 / GROWTH <= rate / before <= GROWTH:  # a sudden change, between two records
            rates = ((step - 1, before, recorded), (step, rate, due))
            self._add([Row(at, *MODEL, 0, RATE, value) for at, value, done in rates if not done])
            self._rate = rate, True
        try:
            if due or (self.processes.size == 1 and self.instruments.on_cpu):
                self._read(due, taken.rate)
        except Diverged as diverged:
            self._act(diverged)
        finally:
            self.instruments.due = self.is_due

    def _read(self, due: bool, rate: float | None) -> None:
        """Read the measurements since the last call, and record the last step if a record is due. Raises Diverged."""
        rows = self.instruments.gradient_rows()
        rows += self.instruments.rows(self.step, self.processes) if due else self.instruments.written_rows(self.step)
        rows += [Row(self.step, *MODEL, 0, RATE, rate)] if due and rate is not None else []
        self.alarms.half = self.instruments.half  # a forward pass may have shown autocast
        series = self.look(rows, rate, due=due)
        self._losses += [row.value for row in series if row.metric == LOSS]
        self._write_batches(series)
        if due:
            self._describe()
            self._write_record(rate)
        for step, *_, metric, value in series:
            if step in self._passed and not self._passed.issuperset(range(step - _IN_A_ROW, step)):
                continue  # the skipped step changed no weight
            if math.isfinite(value):
                self._broken.discard(metric)
            elif metric in self._broken:
                continue  # a note already names the first such step
            elif self.settings.on_divergence == "note":
                self._broken = {LOSS, NORM}
            if metric == LOSS:
                self.guard.see_loss(step, value)
            else:
                self.guard.see_gradient(step, value)

    def _write_batches(self, series: Iterable[Row]) -> None:
        if self.batches is not None:
            self.batches.write({alarm.step for alarm in self.alarms.told}, series, self.processes)

    def take(self, rows: Sequence[Row]) -> None:
        """Record values that the training code reports for a step, while the monitor is open."""
        if self._open:
            super().take(rows)

    @property
    def folder(self) -> Path:
        return Path(self.settings.output) if self.records is None else self.records.folder

    def new_steps(self) -> list[Row]:
        """Return the loss and gradient norm of each new step. A step that a loss scaler skipped has no norm."""
        scaled = self.instruments.scales_losses
        return [row for row in super().new_steps() if not scaled or row.metric != NORM or math.isfinite(row.value)]

    def flush(self) -> None:
        """Write all measurements so far to disk while the monitor is open. Call this in all processes."""
        if self._open:
            super().flush()

    def _write_record(self, rate: float | None) -> None:
        now, tokens = time.monotonic(), self.tokens
        record: Json = {"step": self.step, "tokens": tokens}
        if self._losses:
            record["loss"] = math.fsum(self._losses) / len(self._losses)
        self._losses = []
        record |= {"learning_rate": rate, "grad_norm": self.instruments.last_norm}
        seconds, new = max(now - self._since, 1e-9), tokens - self._tokens_written
        self._since, self._tokens_written = now, tokens
        self.write({**record, "tokens_per_second": new / seconds})

    def _act(self, diverged: Diverged) -> None:
        """Handle a divergence as ``on_divergence`` requests. Raises Diverged if the run should stop."""
        stops = self.settings.on_divergence == "stop"
        if not self.processes.first:
            mark_reported(diverged)
        elif not (stops and self.shows):
            logger.warning("lamina.watch: diverged: %s", diverged)
        self.write_divergence(diverged)
        self.diverged = self.diverged or diverged
        self.guard.accept()
        if stops:
            self.raised = diverged
            raise diverged

    def _leave(self) -> None:
        """Stop watching, because the loop is about to destroy the process group."""
        self.end(sys.exc_info()[1])

    def end(self, error: BaseException | None) -> bool:
        """Close the monitor. Return whether the monitor itself raised the error to stop the training."""
        ended = error is not None and error is self.raised
        if ended or error is None:
            self.close(Status.FINISHED)
        elif isinstance(error, KeyboardInterrupt):
            self.close(Status.INTERRUPTED, f"stopped at step {self.step}")
        else:
            self.close(Status.FAILED, one_line(error))
        return ended

    def close(self, status: Status, reason: str = "") -> None:
        """Remove the hooks, and write the collected measurements. You may call this twice."""
        if not self._open:
            return
        # Other processes may have ended, or the loop may already have destroyed the process group.
        together = self.processes.size == 1 or (status is Status.FINISHED and torch.distributed.is_initialized())
        if status is Status.FINISHED and together:
            with suppress(Diverged):  # ``diverged`` holds the error
                self._end_untold()
        self._open = False
        self._held.close()
        if self.diverged is not None and status in (Status.FINISHED, Status.INTERRUPTED):
            status, reason = Status.DIVERGED, self.diverged.reason
        if together:
            series = self.look(due=False)
            self.alarms.close()
            self._write_batches(series)
        if isinstance(self.records, WatchedRecords):
            seconds = time.monotonic() - self._begun
            new = self.instruments.tokens * self.processes.size
            result: Json = {"status": str(status), "reason": reason, "steps": self.step, "tokens": self.tokens}
            result |= {"seconds": seconds, "tokens_per_second": new / seconds if seconds else None}
            result |= {"parameters": self.instruments.parameters, "skipped": len(self._passed), "loss": self.last_loss}
            self.records.close(result)


def _number(loss: object) -> torch.Tensor:
    """Return a step's loss as a scalar tensor, without waiting for the device."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()).float()
    if isinstance(loss, numbers.Real):
        return torch.tensor(float(loss))
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise UserError(f"loss: {what}. Give one number, the mean over the step's batch.")


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Watch:
    """The context manager that ``lamina.watch`` returns.

    Attributes:
        monitor: the monitor inside the context, or None if Lamina cannot continue the records.
    """

    def __init__(self, begin: Callable[[], LoopMonitor | None]):
        self._begin, self._open = begin, False
        self.monitor: LoopMonitor | None = None

    def __enter__(self) -> Self:
        self.monitor, self._open = self._begin(), True
        return self

    def start(self) -> Self:
        """Watch from now on until the process ends. The loop needs no ``with`` block."""
        atexit.register(self._at_exit)
        self.__enter__()
        if self.monitor is not None:
            self.monitor.shows = True
            sys.excepthook = functools.partial(self._show, sys.excepthook)
        return self

    def _show(self, hook: Callable[..., object], kind: type, error: BaseException, *frames: Any) -> None:
        """Print one line for a divergence that ends the process. Pass any other error to ``hook``."""
        if self.monitor is None or error is not self.monitor.raised:
            hook(kind, error, *frames)
        elif not is_reported(error):
            show_error(
                f'{error}. lamina.watch stopped the training (on_divergence="stop"). Run: lamina diagnose '
                f"{shlex.quote(str(self.monitor.folder))}"
            )

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the error that ends the process
        self.__exit__(None if error is None else type(error), error, None)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """End a step. Call this once after each ``optimizer.step()``, with the step's loss.

        Under accelerate's ``accumulate``, call this after each micro-batch. The step's loss is then the mean over the
        micro-batches. The call waits for the device only at recorded steps. With ``on_divergence="stop"``, a
        divergence ends the ``with`` block here. Raises UserError for a loss that is not a single number.
        """
        assert self._open, (
            "monitor.step() was called outside of the with block of lamina.watch. Call monitor.step() in the block."
        )
        if self.monitor is not None:
            self.monitor.end_step(loss)

    @property
    def diverged(self) -> Diverged | None:
        """The step and reason of the divergence, or None."""
        return None if self.monitor is None else self.monitor.diverged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self.monitor is not None and self.monitor.end(error)


def watch(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    output: str,
    resume: Resume = False,
    overwrite: bool = False,
    step: int = 0,
    on_alarm: OnAlarm | None = None,
    tokenizer: Tokenizer | None = None,
    **settings: object,
) -> Watch:
    """Watch a training loop layer by layer.

    >>> with lamina.watch(model, optimizer, output="runs/mine") as monitor:
    ...     for batch in batches:
    ...         loss = model(**batch).loss
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         monitor.step(loss)

    To add only one line to a loop, call ``lamina.watch(model, optimizer, output="runs/mine").start()`` before the loop.
    A step then ends when the next forward pass begins. The step's loss is the ``loss`` of the model's output, or the
    tensor on which the loop calls ``backward``.

    Call ``watch`` in every process, after you wrap the model in DDP or FSDP. With pipeline parallelism, give each stage
    a separate folder, such as ``output=f"runs/mine/stage-{stage}"``. `lamina report OUTPUT` draws the records, and
    `lamina diagnose OUTPUT` explains the records. Training stays bit-identical, unless ``skip_outliers`` skips a step
    or a compiled model computes in bfloat16.

    Args:
        model: the model that is trained.
        optimizer: the model's optimizer, or a list of optimizers that step together.
        output: the folder of the records. If an earlier training has records there, Lamina writes to NAME-2, NAME-3,
            and so on.
        resume: whether to continue the last training's records. "auto" continues existing records. If Lamina cannot
            continue the records at a ``step`` above 0, training continues without records.
        overwrite: whether to replace the records in ``output``.
        step: the number of steps trained so far.
        on_alarm: a function that the first process calls with the first alarm of each event. An event is a group of
            alarms within 20 steps. The alarm has ``step``, ``layer``, ``sublayer``, ``metric`` and ``value``, and
            ``str(alarm)`` is a sentence. An error in ``on_alarm`` ends the training.
        tokenizer: the tokenizer that decodes recorded batches (default: the model's tokenizer).
        settings: the settings of ``WatchSettings``: every, layers, first_layer, attention, batches, on_divergence,
            divergence_margin, divergence_patience, skip_outliers, report_to.

    Raises:
        UserError: a setting is invalid, the model or the optimizer does not come from torch, or the output folder
            holds files that ``watch`` did not write.
    """
    record = WatchSettings.from_dict({"output": output, **settings})
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"step: {step!r}. Give a whole number, 0 or more.")
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    modes: Json = {"resume": resume, "overwrite": overwrite, "step": step, "on_alarm": on_alarm, "tokenizer": tokenizer}
    return Watch(functools.partial(open_monitor, model, optimizers, record, **modes))


def open_monitor(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: WatchSettings,
    *,
    resume: Resume = False,
    overwrite: bool = False,
    step: int = 0,
    on_alarm: OnAlarm | None = None,
    tokenizer: Tokenizer | None = None,
) -> LoopMonitor | None:
    """Open the folder and attach the hooks, in all processes. Return None if the records cannot continue."""
    processes, stage = processes_of(model, settings)
    instruments = Instruments(model, optimizers, settings)  # rejects invalid arguments before Lamina changes the folder
    instruments.group = stage

    records: list[WatchedRecords] = []

    def claim() -> None:
        try:
            folder = Path(settings.output)
            if stage is None:  # all stages of a pipeline need the same number
                folder = folder_for(settings, resume=resume, overwrite=overwrite)
            records.append(WatchedRecords(settings, folder, resume=resume, overwrite=overwrite, step=step))
        except OSError as error:  # the folder cannot be created
            raise UserError(f"output: {settings.output!r}: {one_line(error)}. Choose another folder.") from error

    try:
        processes.by_first(claim)
    except UserError as error:
        if resume != "auto" or not step:
            raise
        if processes.first:
            logger.warning("lamina.watch: %s. Training continues without records", str(error).removesuffix("."))
        return None
    modes: Json = {"step": step, "on_alarm": on_alarm, "tokenizer": tokenizer}
    monitor = LoopMonitor(instruments, records[0] if records else None, processes, **modes)
    monitor.begin()
    return monitor
