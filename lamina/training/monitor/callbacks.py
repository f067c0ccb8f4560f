"""Monitor other trainers with a callback: `LayerMonitor` for transformers' Trainer."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments

from lamina.core.json_types import Json
from lamina.core.values import real_path
from lamina.errors import UserError
from lamina.jobs.files import read_config, read_result
from lamina.jobs.folder import Resume, in_use, is_locked, old_content
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.status import Status
from lamina.training.monitor.batches import Tokenizer
from lamina.training.monitor.guard import Diverged
from lamina.training.monitor.monitor import OnAlarm
from lamina.training.monitor.policy_signs import logged
from lamina.training.monitor.watch import LoopMonitor, open_monitor
from lamina.training.monitor.writers import WatchSettings

logger = logging.getLogger(__name__)


def was_killed(settings: WatchSettings) -> bool:
    """Return whether the output folder holds records of a killed training with the same settings."""
    folder = Path(settings.output)
    if kind_of(folder) != Kind.WATCHED or not in_use(folder) or is_locked(folder):
        return False
    try:
        if read_result(folder) is not None or read_config(folder) != settings.to_dict():
            return False
    except UserError:
        return False
    logger.warning(
        "lamina.watch: the earlier training in %s was killed before its first checkpoint, so the "
        "records begin again. The old records stay in %s until this training ends",
        *(folder, old_content(folder)),
    )
    return True


class WatchCallback:
    """The base class of the callbacks for Trainer and Lightning."""

    def __init__(
        self,
        output: str,
        *,
        overwrite: bool = False,
        on_alarm: OnAlarm | None = None,
        tokenizer: Tokenizer | None = None,
        **settings: object,
    ):
        super().__init__()
        self.tokenizer = tokenizer
        self.settings = WatchSettings.from_dict({"output": output, **settings})
        self.overwrite, self.on_alarm = overwrite, on_alarm
        self.monitor: LoopMonitor | None = None

    @property
    def diverged(self) -> Diverged | None:
        """The step and reason of the divergence, or None."""
        return None if self.monitor is None else self.monitor.diverged

    def _begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
        """Start the monitor. Continue the records of a resumed training. Replace the records of a killed training."""
        resume: Resume = "auto" if step else False
        overwrite = not step and (self.overwrite or was_killed(self.settings))
        modes: Json = {"resume": resume, "overwrite": overwrite, "on_alarm": self.on_alarm, "tokenizer": self.tokenizer}
        self.monitor = open_monitor(model, optimizers, self.settings, step=step, **modes)

    def _end(self, status: Status) -> None:
        if self.monitor is not None:
            self.monitor.close(status, "" if status is Status.FINISHED else f"ended at step {self.monitor.step}")


class LayerMonitor(WatchCallback, TrainerCallback):
    """Watches a Trainer's run layer by layer.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[lamina.LayerMonitor("runs/mine")])
    >>> trainer.train()

    If Trainer resumes from a checkpoint, Lamina continues the records. If this is impossible, Lamina logs the reason.

    Args:
        output: the folder of the records. If an earlier training has records there, Lamina writes to NAME-2, NAME-3,
            and so on.
        overwrite: whether to replace the records in ``output``.
        on_alarm: a function that Lamina calls with the first alarm of each event (a group of alarms within 20 steps).
        tokenizer: the tokenizer that decodes recorded batches (default: Trainer's or the model's).
        settings: the other settings of ``lamina.watch``.

    Raises:
        UserError: a setting is invalid or, when training begins, the output folder has other files.
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
        if (stale := _OPEN.get(real_path(self.settings.output))) is not None:
            stale._end(Status.INTERRUPTED)  # the earlier training failed, otherwise it would have ended the callback
        processing = kwargs.get("processing_class")
        self.tokenizer = self.tokenizer or (processing if hasattr(processing, "decode") else None)
        self._begin(model, [optimizer], state.global_step)
        if self.monitor is None:
            return
        self.monitor.instruments.half |= bool(args.fp16)
        self.monitor.instruments.scales_losses = bool(args.fp16)
        self._take_losses(_calling_trainer())
        atexit.register(self._end, Status.INTERRUPTED)  # Trainer does not report errors to callbacks
        _OPEN[real_path(self.settings.output)] = self

    def on_step_end(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        if self.monitor is None:
            return
        try:
            self.monitor.end_step()
        except Diverged:
            control.should_training_stop = True
        if control.should_save:
            self.monitor.flush()

    def on_save(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        if self.monitor is not None:
            self.monitor.flush()

    def on_log(
        self, args: Arguments, state: State, control: Control, logs: Json | None = None, **kwargs: object
    ) -> None:
        if self.monitor is not None:
            self.monitor.take(logged(state.global_step, logs or {}))

    def on_evaluate(
        self, args: Arguments, state: State, control: Control, metrics: Json | None = None, **kwargs: object
    ) -> None:
        loss = float((metrics or {}).get("eval_loss", math.nan))
        if self.monitor is not None:
            self.monitor.write({"step": state.global_step, "tokens": self.monitor.tokens, "eval_loss": loss})

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        self._end(Status.FINISHED if state.global_step >= state.max_steps else Status.INTERRUPTED)

    def _take_losses(self, trainer: Trainer | None) -> None:
        """Record the losses that ``training_step`` returns. The losses of the micro-batches sum to the step's loss."""
        assert self.monitor is not None
        if trainer is None:
            return  # another loop than Trainer's: the losses come from the model's outputs
        instruments, step, own = self.monitor.instruments, trainer.training_step, vars(trainer).get("training_step")
        instruments.takes_shares = True

        @functools.wraps(step)
        def telling(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = step(*args, **kwargs)
            if self._release is release:
                instruments.now.losses.append(loss.detach())
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
        _OPEN.pop(real_path(self.settings.output), None)
        super()._end(status)


def _calling_trainer() -> Trainer | None:
    """Find the calling Trainer on the call stack, because Trainer does not pass itself to callbacks."""
    callers = (info.frame.f_locals.get("self") for info in inspect.stack(0))
    return next((caller for caller in callers if isinstance(caller, Trainer)), None)


_OPEN: dict[Path, LayerMonitor] = {}
"""The callbacks of trainings that have not ended, by the absolute path of the folder."""
