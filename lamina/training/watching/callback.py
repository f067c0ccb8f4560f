"""`lamina.LayerMonitor`: the layer monitor as a callback for transformers' Trainer and TRL's trainers."""

from __future__ import annotations

import atexit
import math
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.status import Status
from lamina.training.monitoring.guard import Diverged
from lamina.training.watching.loop import open_monitor
from lamina.training.watching.monitor import Monitor
from lamina.training.watching.settings import WatchSettings


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
        self._factor = self.monitor.processes.size if args.average_tokens_across_devices else 1
        atexit.register(self._end, Status.INTERRUPTED)  # Trainer tells nobody of an error
        _OPEN[Path(self.settings.output).resolve()] = self

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.monitor is None:
            return
        instruments = self.monitor.instruments
        summed = instruments.summed
        loss = instruments.take_loss()
        if loss is not None and summed:
            loss = loss * self._factor
        try:
            self.monitor.end_step(loss)
        except Diverged:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Json | None = None,
        **kwargs: object,
    ) -> None:
        """Keep Trainer's own loss where the model's outputs hold none (GRPO)."""
        if self.monitor is None or self.monitor.records is None or self.monitor.instruments.saw_loss:
            return
        if logs and "loss" in logs:
            self.monitor.records.write({"step": state.global_step, "loss": float(logs["loss"])})

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

    def _end(self, status: Status) -> None:
        atexit.unregister(self._end)
        _OPEN.pop(Path(self.settings.output).resolve(), None)
        if self.monitor is not None:
            self.monitor.close(status, "" if status is Status.FINISHED else f"ended at step {self.monitor.step}")


_OPEN: dict[Path, LayerMonitor] = {}
"""Those whose training has not ended, by resolved folder."""


def _end_stale(output: str) -> None:
    """End this process' monitor in a folder if there is one: its training failed, else it would have ended it."""
    if (stale := _OPEN.get(Path(output).resolve())) is not None:
        stale._end(Status.INTERRUPTED)
