"""`lamina.LayerMonitor`: the layer monitor as a callback for transformers' Trainer and TRL's trainers."""

from __future__ import annotations

import atexit
import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.status import Status
from lamina.training.monitor.guard import Diverged
from lamina.training.monitor.monitor import Monitor
from lamina.training.monitor.watch import open_monitor
from lamina.training.monitor.watch_settings import WatchSettings


class LayerMonitor(TrainerCallback):
    """Watches a Trainer's run layer by layer.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[lamina.LayerMonitor("runs/mine")])
    >>> trainer.train()

    With ``on_divergence="stop"``, training ends after the step at which the guard finds a divergence. A run that
    Trainer resumes from a checkpoint continues its records; where they cannot be continued, one line says so.

    Args:
        output: the folder of the records.
        overwrite: replace what it holds.
        settings: those of ``lamina.watch``.

    Raises:
        UserError: for invalid settings; when training begins, for an output folder in use.
    """

    def __init__(self, output: str, *, overwrite: bool = False, **settings: object):
        self.settings = WatchSettings.from_dict({"output": output, **settings})
        self.overwrite = overwrite
        self.monitor: Monitor | None = None
        self._release: Callable[[], None] = _nothing

    @property
    def diverged(self) -> Diverged | None:
        """Why and where the run diverged; None if it did not."""
        return None if self.monitor is None else self.monitor.diverged

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        assert model is not None
        assert optimizer is not None
        _end_stale(self.settings.output)
        resume: Resume = "auto" if state.global_step else False
        overwrite = self.overwrite and not resume
        self.monitor = open_monitor(
            model, [optimizer], self.settings, resume=resume, overwrite=overwrite, step=state.global_step
        )
        if self.monitor is None:
            return
        self.monitor.instruments.half |= bool(args.fp16)
        self.monitor.instruments.scales_losses = bool(args.fp16)
        self._take_losses(_calling_trainer())
        atexit.register(self._end, Status.INTERRUPTED)  # Trainer tells nobody of an error
        _OPEN[Path(self.settings.output).resolve()] = self

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.monitor is None:
            return
        try:
            self.monitor.end_step()
        except Diverged:
            control.should_training_stop = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Json | None = None,
        **kwargs: object,
    ) -> None:
        loss = float((metrics or {}).get("eval_loss", math.nan))
        if self.monitor is not None and self.monitor.records is not None:
            record = {"step": state.global_step, "tokens": self.monitor.tokens, "eval_loss": loss}
            self.monitor.records.metrics.write(record)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
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
                instruments.add_share(loss)
            return loss

        def release() -> None:
            if vars(trainer).get("training_step") is telling:
                del trainer.training_step
                vars(trainer).update({} if own is None else {"training_step": own})

        self._release = release
        vars(trainer)["training_step"] = telling

    def _end(self, status: Status) -> None:
        self._release()
        self._release = _nothing
        atexit.unregister(self._end)
        _OPEN.pop(Path(self.settings.output).resolve(), None)
        if self.monitor is not None:
            self.monitor.close(status, "" if status is Status.FINISHED else f"ended at step {self.monitor.step}")


def _nothing() -> None:
    """Nothing to undo."""


def _calling_trainer() -> Trainer | None:
    """The Trainer whose event this is; an event's arguments do not hold it."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    return None


_OPEN: dict[Path, LayerMonitor] = {}
"""Those whose training has not ended, by resolved folder."""


def _end_stale(output: str) -> None:
    """End this process' monitor in a folder if there is one: its training failed, else it would have ended it."""
    if (stale := _OPEN.get(Path(output).resolve())) is not None:
        stale._end(Status.INTERRUPTED)
