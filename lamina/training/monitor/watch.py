"""The monitor in other people's training: `lamina.watch` for a loop, `lamina.LayerMonitor` for a Trainer."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed, nn
from transformers import Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments

from lamina.core.json_types import Json
from lamina.errors import UserError, one_line
from lamina.jobs.folder import Resume
from lamina.jobs.status import Status
from lamina.modeling.processes import Processes
from lamina.training.monitor.guard import Diverged
from lamina.training.monitor.monitor import Monitor, OnAlarm, WatchedRecords
from lamina.training.monitor.training_hooks import Instruments
from lamina.training.monitor.writers import WatchSettings

logger = logging.getLogger(__name__)


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Watch:
    """The context of ``lamina.watch``.

    Attributes:
        monitor: while the context is open; None where the records cannot be continued (``open_monitor``).
        diverged: the guard's verdict, once it has one.
    """

    def __init__(self, begin: Callable[[], Monitor | None]):
        self._begin, self._open = begin, False
        self.monitor: Monitor | None = None

    def __enter__(self) -> Self:
        self.monitor, self._open = self._begin(), True
        return self

    def start(self) -> Self:
        """Open the context until the process ends, for a loop that one line is added to."""
        atexit.register(self._at_exit)
        return self.__enter__()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # that ends the process
        self.__exit__(None if error is None else type(error), error, None)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """End a step: call it once after each ``optimizer.step()``, with the step's loss.

        Under accelerate's ``accumulate``, a call after an ``optimizer.step()`` that accelerate left out ends a
        micro-batch; the step's loss is the mean over them.

        Does not wait for the device but where a record is due (every ``every``-th step). With
        ``on_divergence="stop"``, a divergence ends the ``with`` block here. Raises UserError for a loss that is not one
        number.
        """
        assert self._open, "monitor.step() belongs into the with block of lamina.watch"
        if self.monitor is not None:
            self.monitor.end_step(loss)

    @property
    def diverged(self) -> Diverged | None:
        """Why and where the run diverged; None if it did not."""
        return None if self.monitor is None else self.monitor.diverged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self.monitor is None:
            return False
        ended = isinstance(error, Diverged) and error is self.monitor.diverged
        if ended or error is None:
            self.monitor.close(Status.FINISHED)
        elif isinstance(error, KeyboardInterrupt):
            self.monitor.close(Status.INTERRUPTED, f"stopped at step {self.monitor.step}")
        else:
            self.monitor.close(Status.FAILED, one_line(error))
        return ended


def watch(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    output: str,
    resume: Resume = False,
    overwrite: bool = False,
    step: int = 0,
    on_alarm: OnAlarm | None = None,
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

    Without ``monitor.step``, a step ends where the next forward pass begins, so that one line before a loop watches it
    until the process ends: ``lamina.watch(model, optimizer, output="runs/mine").start()``. A step's loss is then the
    ``loss`` of the model's output, or else what the loop calls ``backward`` on.

    Works with any model whose layers the probes can follow, with gradient accumulation, clipping, DDP and FSDP2 (call
    it in every process, after the model is wrapped). `lamina report OUTPUT` draws the records, `lamina diagnose
    OUTPUT` reads them. The training itself computes the same bits as without it, unless ``skip_outliers`` changes it.

    Args:
        model: the model that is trained.
        optimizer: its optimizer, or a list of several that step together.
        output: the folder of the records.
        resume: continue the records of ``output`` after ``step``; "auto": if there are any. A training that goes on
            after a step does so without records then, where they cannot be continued (another version's).
        overwrite: replace them.
        step: the steps that were done before.
        on_alarm: called in the first process with the first alarm of each event, which has ``step``, ``layer``,
            ``sublayer``, ``metric`` and ``value``, and is a sentence as a text. An error that it raises ends the
            training.
        settings: see ``WatchSettings``: every, layers, attention, on_divergence, divergence_margin,
            divergence_patience, skip_outliers, report_to.

    Raises:
        UserError: for invalid settings, a model or an optimizer that is not torch's, an output folder in use.
    """
    record = WatchSettings.from_dict({"output": output, **settings})
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"step: {step!r} (allowed: a whole number, 0 or more)")
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    modes: Json = {"resume": resume, "overwrite": overwrite, "step": step, "on_alarm": on_alarm}
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
) -> Monitor | None:
    """Begin a monitor; all processes of a run call it.

    None where ``resume="auto"`` finds records after ``step`` steps that cannot be continued, which is said in one line:
    a training that has begun does not end for its records. Raises UserError otherwise.
    """
    processes = Processes()
    if distributed.is_available() and distributed.is_initialized() and (size := distributed.get_world_size()) > 1:
        group = None if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
        processes = Processes(rank=distributed.get_rank(), size=size, group=group)
    instruments = Instruments(model, optimizers, settings)  # refuses before the folder is touched

    records: list[WatchedRecords] = []

    def claim() -> None:
        try:
            records.append(WatchedRecords(settings, resume=resume, overwrite=overwrite, step=step))
        except OSError as error:  # a folder that cannot be made
            raise UserError(f"output: {settings.output!r}: {one_line(error)} (allowed: a folder)") from error

    try:
        processes.by_first(claim)
    except UserError as error:
        if resume != "auto" or not step:
            raise
        if processes.first:
            logger.warning("lamina.watch: %s; training goes on without records", error)
        return None
    monitor = Monitor(instruments, records[0] if records else None, processes, step=step, on_alarm=on_alarm)
    monitor.begin()
    return monitor


class WatchCallback:
    """What the callbacks of two libraries' trainers share: arguments as of ``lamina.watch``, and a monitor."""

    def __init__(self, output: str, *, overwrite: bool = False, on_alarm: OnAlarm | None = None, **settings: object):
        super().__init__()
        self.settings = WatchSettings.from_dict({"output": output, **settings})
        self.overwrite, self.on_alarm = overwrite, on_alarm
        self.monitor: Monitor | None = None

    @property
    def diverged(self) -> Diverged | None:
        """Why and where the run diverged; None if it did not."""
        return None if self.monitor is None else self.monitor.diverged

    def _begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
        """Begin the monitor after ``step`` steps, those of a checkpoint: then it continues the records."""
        resume: Resume = "auto" if step else False
        modes: Json = {"resume": resume, "overwrite": self.overwrite and not step, "on_alarm": self.on_alarm}
        self.monitor = open_monitor(model, optimizers, self.settings, step=step, **modes)

    def _end(self, status: Status) -> None:
        if self.monitor is not None:
            self.monitor.close(status, "" if status is Status.FINISHED else f"ended at step {self.monitor.step}")


class LayerMonitor(WatchCallback, TrainerCallback):
    """Watches a Trainer's run layer by layer.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[lamina.LayerMonitor("runs/mine")])
    >>> trainer.train()

    With ``on_divergence="stop"``, training ends after the step at which the guard finds a divergence. A run that
    Trainer resumes from a checkpoint continues its records; where they cannot be continued, one line says so.

    Args:
        output: the folder of the records.
        overwrite: replace what it holds.
        on_alarm, settings: those of ``lamina.watch``.

    Raises:
        UserError: for invalid settings; when training begins, for an output folder in use.
    """

    _release: Callable[[], None] | None = None

    def on_train_begin(
        self,
        args: Arguments,
        state: State,
        control: Control,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        assert model is not None
        assert optimizer is not None
        if (stale := _OPEN.get(Path(self.settings.output).resolve())) is not None:
            stale._end(Status.INTERRUPTED)  # its training failed, else it would have ended it
        self._begin(model, [optimizer], state.global_step)
        if self.monitor is None:
            return
        self.monitor.instruments.half |= bool(args.fp16)
        self.monitor.instruments.scales_losses = bool(args.fp16)
        self._take_losses(_calling_trainer())
        atexit.register(self._end, Status.INTERRUPTED)  # Trainer tells nobody of an error
        _OPEN[Path(self.settings.output).resolve()] = self

    def on_step_end(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        if self.monitor is None:
            return
        try:
            self.monitor.end_step()
        except Diverged:
            control.should_training_stop = True

    def on_evaluate(
        self, args: Arguments, state: State, control: Control, metrics: Json | None = None, **kwargs: object
    ) -> None:
        loss = float((metrics or {}).get("eval_loss", math.nan))
        if self.monitor is not None and self.monitor.records is not None:
            record = {"step": state.global_step, "tokens": self.monitor.tokens, "eval_loss": loss}
            self.monitor.records.metrics.write(record)

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        self._end(Status.FINISHED if state.global_step >= state.max_steps else Status.INTERRUPTED)

    def _take_losses(self, trainer: Trainer | None) -> None:
        """Record what a trainer's ``training_step`` returns: a micro-batch's share of the loss that is trained."""
        assert self.monitor is not None
        if trainer is None:
            return  # not Trainer's loop: the model's outputs say it
        instruments, step, own = self.monitor.instruments, trainer.training_step, vars(trainer).get("training_step")
        instruments.takes_shares = True

        @functools.wraps(step)
        def telling(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = step(*args, **kwargs)
            if self._release is release:
                instruments.losses.append(loss.detach())
            return loss

        def release() -> None:
            if vars(trainer).get("training_step") is telling:
                del trainer.training_step
                vars(trainer).update({} if own is None else {"training_step": own})

        self._release = release
        vars(trainer)["training_step"] = telling

    def _end(self, status: Status) -> None:
        if self._release is not None:
            self._release()
            self._release = None
        atexit.unregister(self._end)
        _OPEN.pop(Path(self.settings.output).resolve(), None)
        super()._end(status)


def _calling_trainer() -> Trainer | None:
    """Return the Trainer that sent the event, since an event's arguments do not hold it."""
    callers = (info.frame.f_locals.get("self") for info in inspect.stack(0))
    return next((caller for caller in callers if isinstance(caller, Trainer)), None)


_OPEN: dict[Path, LayerMonitor] = {}
"""Those whose training has not ended, by resolved folder."""
