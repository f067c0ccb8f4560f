"""Checkpoints that are whole or absent, for Trainer and for TRL's trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer

from lamina.core.json_types import Json
from lamina.training.checkpointing import state as saving
from lamina.training.checkpointing.checkpoints import Checkpoints, RunState, Stateful, collected
from lamina.training.execution.processes import Processes
from lamina.training.monitor.guard import DivergenceGuard
from lamina.training.optimization.averaging import WeightAverage

_Trainer = Trainer if TYPE_CHECKING else object  # a mixin: the class that uses it chooses the trainer


class CheckpointedTrainer(_Trainer):
    """A mixin for Trainer and TRL's trainers: writes and reads Lamina's checkpoints in place of Trainer's.

    Attributes:
        processes: this process and the run's others.
        guard: its observations are part of a checkpoint; on a GPU it checks the losses when one is written.
        states: further objects in a checkpoint's run state, resumed with the trainer.
        keep_also: whether an older checkpoint is not pruned, by its run state.
        rate_factor: the rollbacks' factor on all learning rates.
        average: of the weights; a checkpoint holds it, too.
    """

    processes: Processes
    guard: DivergenceGuard
    states: Sequence[Stateful] = ()
    keep_also: Callable[[Json], bool] | None = None
    rate_factor: float = 1.0
    average: WeightAverage | None = None
    overflows: int
    overflows_in_a_row: int
    _resumed: RunState = MappingProxyType({})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, whole or not at all, then prune the old ones."""
        step, checkpoints = self.state.global_step, Checkpoints(Path(str(self.args.output_dir)))
        own = self.state_dict()
        if not math.isfinite(loss := sum(own["losses"])):  # on a GPU, not every step's loss is checked
            self.guard.see_loss(step, loss)
        self.store_flos()
        state = {**own, **collected((*self.states, self.guard))}  # the recorder shows the guard its last steps
        with checkpoints.save(step, self.processes) as path:
            saving.write(self, self.processes, path, state)
            if self.average is not None:
                self.processes.by_first(partial(self.average.write, path))
        keep = self.args.save_total_limit or 1
        self.processes.by_first(lambda: checkpoints.prune(step, keep, self.keep_also))

    def state_dict(self) -> Json:
        """Its part of a checkpoint's run state: the losses since the last record, the rate factor, fp16's overflows."""
        return {
            "step": self.state.global_step,
            "losses": self.processes.everyones(float(self._tr_loss)),
            "logged_step": self._globalstep_last_logged,
            "learning_rate_factor": self.rate_factor,
            "overflows": [self.overflows, self.overflows_in_a_row],
        }

    def load_state_dict(self, state: RunState) -> None:
        """Resume with a checkpoint's run state: the guard and ``states`` now, the trainer when training begins."""
        self._resumed = state
        self.overflows, self.overflows_in_a_row = state.get("overflows", [0, 0])
        for stateful in (self.guard, *self.states):
            stateful.load_state_dict(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        saving.read_model(self, self.processes, Path(resume_from_checkpoint))
        if self.average is not None:
            self.average.read(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saving.read_optimizer(self, Path(checkpoint))
            saving.scale_learning_rate(self, self.rate_factor / self._resumed.get("learning_rate_factor", 1.0))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's schedule; after a rollback to the start, where no checkpoint is read, at the rates it asks for."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if self._resumed.get("step", -1) < 0 and self.rate_factor != 1:
            saving.scale_learning_rate(self, self.rate_factor)
        return schedule

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saving.read_random_state(self, self.processes, Path(checkpoint))

    def continue_records(self) -> None:
        """Restore the loss collected since the last record before the checkpoint; call when training begins."""
        losses = self._resumed.get("losses")
        if losses is None or self._resumed["step"] != self.state.global_step:
            return
        same = len(losses) == self.processes.size
        self._tr_loss += losses[self.processes.rank] if same else sum(losses) / len(losses)
        self._globalstep_last_logged = self._resumed["logged_step"]
