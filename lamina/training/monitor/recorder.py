"""Connect the monitor with Lamina's own runs: Trainer's events, progress, timing and Ctrl-C."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments

from lamina.core.json_types import Json
from lamina.core.progress import ProgressLines, has_bars
from lamina.data.blocks import PartShare
from lamina.jobs.signals import STOP_SIGNALS, WARNING_SIGNALS, handled, orphaned
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.modeling.processes import Processes
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.checkpointing.sharding import sum_partial
from lamina.training.monitor.experts import ExpertBalance
from lamina.training.monitor.gain_measures import Gain, gain_rows
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.monitor import Monitor, StepSeries
from lamina.training.monitor.parameter_measures import (
    FirstFailure,
    GradientNorms,
    UpdateRatios,
    clip,
    is_recorded,
    reading_waits,
)
from lamina.training.monitor.policy_signs import logged
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.monitor.writers import LastEvaluation, Row

Norm = Any
"""A gradient norm from Trainer: a tensor, a DTensor or a number."""
_Trainer = Trainer if TYPE_CHECKING else object  # a mixin: the class that uses it chooses the trainer


class MonitoredTrainer(_Trainer):
    """Check each layer's gradient norm before clipping, in Trainer and TRL's trainers.

    Trainer calls the hook ``on_pre_optimizer_step`` only after clipping, so this class overrides two methods.
    """

    processes: Processes
    guard: DivergenceGuard
    layer_rows: Sequence[Row] = ()  # the measurements of the last step's gradients, if the step is recorded
    series: StepSeries  # the monitor's losses and norms
    experts: ExpertBalance | None = None
    evaluation: LastEvaluation = LastEvaluation()  # the recorder sets step and loss
    overflows: int = 0
    overflows_in_a_row: int = 0
    _wrapped: nn.Module | None = None
    _bare: LaminaForCausalLM

    def _clip_grad_norm(self, model: nn.Module) -> Norm:
        if self.scaler() is None and self.gradient_norms.clips():
            return self._checked(*self.gradient_norms.clip(self.args.max_grad_norm))
        squares = self._squares()  # before clipping, because clipping by a NaN norm spoils every layer's gradient
        shared = self.processes.tensor > 1
        return self._checked(
            clip(model, self.args.max_grad_norm) if shared else super()._clip_grad_norm(model), squares
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> Norm:
        if grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)
        squares = self._squares()  # without clipping, Trainer calls only this method
        return self._checked(super()._get_grad_norm(model), squares)

    @cached_property
    def gradient_norms(self) -> GradientNorms:
        return GradientNorms(self.bare_model())

    def _squares(self) -> torch.Tensor:
        sum_partial(self.bare_model())
        squares = self.gradient_norms.squares()
        if (scaler := self.scaler()) is not None:  # the gradients are still those of the scaled loss
            squares = squares / scaler.scale(torch.ones((), device=squares.device)) ** 2
        return squares

    def scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.accelerator, "scaler", None)

    def count_overflow(self) -> bool:
        """Return whether the loss scaler skipped the step, and count skipped steps."""
        skipped = self.scaler() is not None and bool(self.accelerator.optimizer_step_was_skipped)
        self.overflows += skipped
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if skipped else 0
        return skipped

    def failed_loss(self, loss: torch.Tensor) -> float | None:
        """Record a micro-batch's loss. Return the processes' mean loss if it is not finite, otherwise None."""
        self.series.add_loss(loss)
        late = reading_waits(loss)
        # reading waits for the device, and fp16's loss scaler skips such a step itself
        if late and (self.scaler() is not None or not is_recorded(self.state.global_step + 1, self.args)):
            return None
        if math.isfinite(value := self.processes.mean(float(loss))) or (late and self.first_failure.read()[0]):
            return None
        return value

    @cached_property
    def first_failure(self) -> FirstFailure:
        return FirstFailure()

    def _checked(self, norm: Norm, squares: torch.Tensor) -> Norm:
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.series.add_norm(norm)
        first = step = self.state.global_step + 1
        recorded = is_recorded(step, self.args)
        self.layer_rows = []
        waits = reading_waits(squares)
        if late := waits and self.scaler() is None:
            self.first_failure.see(step, torch.as_tensor(norm, device=squares.device), squares)
        if waits and not recorded:
            return norm
        value = float(norm)
        if late and not math.isfinite(value):
            first, squares = self.first_failure.read()
        if recorded or not math.isfinite(value):
            # a fault that every layer shares came from the loss or an earlier step, and no layer is its cause
            told = first == step or bool(torch.isfinite(squares).any())
            self.layer_rows = self.gradient_norms.rows(first, squares) if told else []
        if not math.isfinite(value) and self.scaler() is not None and self.overflows_in_a_row < self.guard.patience:
            self.layer_rows = []  # the scaler skips the step and halves its scale: nothing has diverged yet
            return norm
        self.guard.see_gradient(step, value, first, self.layer_rows)
        return norm

    def continue_records(self) -> None:
        """Restore the losses since the last record. Lamina calls this when training begins."""

    def bare_model(self) -> LaminaForCausalLM:
        """Return the model without the wrappers of accelerate and DDP. Cache the model, because unwrapping is slow."""
        assert self.model is not None
        if self._wrapped is not self.model:
            self._wrapped, self._bare = self.model, self.accelerator.unwrap_model(self.model)
        return self._bare


TWICE_SECONDS = 3.0
Measure = Callable[[nn.Module, torch.Tensor, int], list[Row]]
"""A function that measures hidden states and gains. Arguments: the model, held-out inputs [items, ...] and the step."""


def lamina_rows(model: nn.Module, inputs: torch.Tensor, step: int) -> list[Row]:
    return [*hidden_state_rows(model, inputs, step), *gain_rows(model, step)]


@dataclass(kw_only=True, eq=False)
class RunRecorder(Monitor, TrainerCallback):
    """The monitor of Lamina's own runs, which also shows progress and handles Ctrl-C."""

    monitor_inputs: torch.Tensor
    tokens_of: Callable[[int], int]  # a function that returns the number of tokens in the first n steps
    derived: Callable[[float], dict[str, float]]
    # a function that returns how much each corpus provides in the first n steps ({} for a single corpus)
    realized: Callable[[int], dict[str, PartShare]]
    updates: UpdateRatios
    measure: Measure
    gains_of: Callable[[nn.Module], list[Gain]]
    show_bar: bool
    pause_step: int | None
    full_speed: float | None = None  # the tokens per second at the GPUs' peak speed, or None
    unit: str = "tokens"  # the word for tokens in progress lines
    trainer: MonitoredTrainer = field(init=False)  # the run's Trainer, which the caller sets before training begins

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bar, self.lines, self.interrupted, self.best_eval = None, None, None, math.inf
        # The clock stops during evaluations, records and checkpoints, which are not training time. If the device
        # lags behind the CPU, the clock runs on between steps, because only a record waits for the device.
        self.training_seconds, self.training_steps = 0.0, 0
        self._since: float | None = None
        self._begun_at = 0  # the step at which this process began
        self._logged_tokens, self._logged_seconds = 0, 0.0

    def on_train_begin(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        off = not (self.show_bar and has_bars())
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=off, dynamic_ncols=True)
        self.lines = ProgressLines(state.max_steps, show=self.show_bar and off)
        self.trainer.continue_records()
        self.alarms.half = bool(args.fp16)
        self.alarms.vocabulary = getattr(self.trainer.bare_model().config, "vocab_size", None)
        self.step = self._begun_at = state.global_step
        self._logged_tokens = self.tokens_at(state.global_step)
        self.gains.follow(self.gains_of(self.trainer.bare_model()))
        if state.global_step == 0:
            self._record()

    def on_step_begin(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        self._since = time.monotonic() if self._since is None else self._since

    def on_step_end(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        self.training_steps += 1
        self._end_step(state.global_step, skipped=self.trainer.count_overflow())
        if self.bar is not None:
            self.bar.update(1)
        if orphaned():
            self.interrupted = "the study that started this run has ended"
        pause = self.pause_step
        if pause is not None and self._begun_at < pause <= state.global_step < state.max_steps:
            self.interrupted, control.should_evaluate = "paused", True
        if self.processes.anyone(self.interrupted is not None):  # signals reach processes at different moments
            self.interrupted = next(reason for reason in self.processes.everyones(self.interrupted) if reason)
            control.should_training_stop = control.should_save = True
        if args.device.type == "cpu" or control.should_log or control.should_evaluate or control.should_save:
            self.stop_clock()

    def stop_clock(self) -> None:
        """Stop the clock until the next step, and add the elapsed time to ``training_seconds``."""
        if self._since is None:
            return
        if self.trainer.args.device.type != "cpu":
            torch.accelerator.synchronize()
        self.training_seconds += time.monotonic() - self._since
        self._since = None

    def utilization(self, speed: float) -> Json:
        """Return the model FLOPs utilization (mfu) at a speed in tokens per second, or {} if the peak is unknown."""
        return {} if self.full_speed is None else {"mfu": speed / self.full_speed}

    def on_log(self, args: Arguments, state: State, control: Control, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        seconds, self._logged_seconds = self.training_seconds - self._logged_seconds, self.training_seconds
        loss, norm = float(logs["loss"]), float(logs.get("grad_norm", math.nan))
        tokens = self.tokens_at(step)
        record = {"step": step, "tokens": tokens, "loss": loss}
        record |= {"learning_rate": logs.get("learning_rate"), "grad_norm": norm, **self.measured(logs)}
        if (scaler := self.trainer.scaler()) is not None:
            record |= {"loss_scale": scaler.get_scale(), "overflows": self.trainer.overflows}
        if mix := self.realized(step):
            record["mix"] = {name: part["share"] for name, part in mix.items()}
        new, self._logged_tokens = tokens - self._logged_tokens, tokens
        speed = new / max(seconds, 1e-9)
        used = self.utilization(speed)
        self.write({**record, "tokens_per_second": speed, **used})
        pace = f"{speed:,.0f} {self.unit}/s" + (f", MFU {used['mfu']:.1%}" if used else "")
        if self.lines is not None:
            rate = "-" if record["learning_rate"] is None else f"{record['learning_rate']:.2e}"
            numbers = {"loss": f"{loss:.4f}", "learning rate": rate, "gradient norm": f"{norm:.3g}"}
            self.lines.see(step, {**numbers, "": pace})
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss={loss:.3f}, {pace}", refresh=False)
        self.take(logged(step, logs))
        self._record()
        self.guard.see_loss(step, loss)

    def _record(self) -> None:
        model, experts = self.trainer.bare_model(), self.trainer.experts
        inputs = self.monitor_inputs.to(next(model.parameters()).device)
        rows = [*self.trainer.layer_rows, *self.measure(model, inputs, self.step), *self.updates.rows(self.step)]
        rows += [] if experts is None else experts.rows(self.step)
        self.look(rows, self.updates.rate)

    @property
    def evaluation(self) -> LastEvaluation:
        return self.trainer.evaluation

    def has_evaluated(self, step: int) -> bool:
        return self.evaluation.step == step

    def tokens_at(self, step: int) -> int:
        """Return the number of tokens in the first ``step`` steps, without padding."""
        return self.tokens_of(step)

    def measured(self, logs: Json) -> Json:
        """Return the columns that a subclass adds to training records."""
        return {}

    def on_evaluate(
        self, args: Arguments, state: State, control: Control, metrics: Json | None = None, **kwargs: object
    ) -> None:
        loss = float((metrics or {}).get("eval_loss", math.nan))
        self.best_eval = min(self.best_eval, loss) if math.isfinite(loss) else self.best_eval
        self.trainer.evaluation = last = replace(self.evaluation, step=state.global_step, loss=loss)
        record: Json = {"step": last.step, "tokens": self.tokens_at(last.step), **self.evaluated(metrics or {}, loss)}
        record |= {**last.scores, **last.apart()}
        self.write(record)

    def evaluated(self, metrics: Json, loss: float) -> Json:
        """Return the columns of an evaluation's record."""
        return {"eval_loss": loss, **self.derived(loss)}

    def state_dict(self) -> Json:
        last = self.evaluation
        second = {} if last.second is None else {"eval_corpus_loss": last.second}
        scores = {"scores": dict(last.scores)} if last.scores else {}
        return {**super().state_dict(), "evaluations": [last.step, last.loss, self.best_eval], **second, **scores}

    def load_state_dict(self, state: RunState) -> None:
        """Restore a checkpoint's evaluations, unless metrics.jsonl has a later evaluation."""
        super().load_state_dict(state)
        recorded = LastEvaluation()
        if self.records is not None:
            recorded, self.best_eval = self.records.metrics.evaluation, self.records.metrics.best_eval
        if "evaluations" in state:
            step, loss, best = state["evaluations"]
            recorded = replace(
                recorded,
                second=state.get("eval_corpus_loss") if recorded.second is None else recorded.second,
                scores=recorded.scores or dict(state.get("scores", {})),
            )
            recorded = replace(recorded, step=int(step), loss=loss) if step > recorded.step else recorded
            self.best_eval = min(self.best_eval, best)
        self.trainer.evaluation = recorded

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: object) -> None:
        self.stop_clock()
        self.look(due=False)

    def record_divergence(self, diverged: Diverged) -> None:
        """Record the measurements of the step that ended the run, for the diagnosis."""
        self._end_step(diverged.step)  # the step that diverged was not ended
        self.look(due=False)
        self._add(self.trainer.layer_rows)
        self.write_divergence(diverged, self.tokens_at(diverged.step))

    def close(self) -> None:
        """Write the collected measurements and close the progress bar. You may call this twice."""
        try:
            self.alarms.close()
            if self.records is not None:
                self.records.layers.flush()
                self.records.trackers.close()
        finally:
            if self.bar is not None:
                self.bar.close()


@contextmanager
def stop_signals(recorder: RunRecorder) -> Iterator[None]:
    """End the run with a checkpoint after the first Ctrl-C, SIGTERM or SIGUSR1, and at once after the second."""
    first = 0.0

    def stop(number: int) -> None:
        nonlocal first
        now = time.monotonic()
        # torchrun forwards the Ctrl-C that the terminal has already sent to its processes
        if recorder.interrupted and (recorder.processes.size == 1 or now - first > TWICE_SECONDS):
            raise KeyboardInterrupt
        first = now if not recorder.interrupted else first
        recorder.interrupted = f"stopped by {signal.Signals(number).name}"

    # Slurm can send SIGUSR1 before a job's time limit
    with handled((*STOP_SIGNALS, *WARNING_SIGNALS), stop):
        yield
