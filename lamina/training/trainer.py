"""transformers' Trainer with the layer monitor, the divergence guard and the run folder's records."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.training.folder import LayersWriter, MetricsWriter
from lamina.training.guard import DivergenceGuard
from lamina.training.monitor import Row, gain_rows, hidden_state_rows, layer_gradient_norms


class LayerGradNorms:
    """A mixin for Trainer and TRL's trainers: per-layer gradient norms before clipping, and the guard's first look.

    Trainer's own hook before the optimiser step comes after clipping, hence the two overridden methods.
    """

    guard: DivergenceGuard
    layer_rows: list[Row]
    state: TrainerState
    args: TrainingArguments

    def _records_next(self) -> bool:
        step = self.state.global_step + 1
        return step == 1 or step % max(1, int(self.args.logging_steps)) == 0

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        rows = layer_gradient_norms(self._plain(model), self.state.global_step + 1) if self._records_next() else []
        norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        self._look(model, norm, rows)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        # Without clipping Trainer calls only this one.
        rows = layer_gradient_norms(self._plain(model), self.state.global_step + 1) if self._records_next() else []
        norm = super()._get_grad_norm(model)  # type: ignore[misc]
        self._look(model, norm, rows)
        return norm

    def _look(self, model: nn.Module, norm: Any, rows: list[Row]) -> None:
        step = self.state.global_step + 1
        self.layer_rows = rows
        self.guard.see_layers(rows)
        on_cpu = not isinstance(norm, torch.Tensor) or norm.device.type == "cpu"
        if on_cpu or rows:  # elsewhere every look would wait for the device
            value = float(norm)
            if not math.isfinite(value) and not rows:
                rows = layer_gradient_norms(self._plain(model), step)
            self.guard.see_gradient(step, value, rows)

    def _plain(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]


class LaminaTrainer(LayerGradNorms, Trainer):
    """Trainer for pretraining: weight decay on matrices only, every step's loss seen by the guard."""

    def __init__(self, *args: Any, guard: DivergenceGuard, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.guard = guard
        self.layer_rows = []

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; gains, biases and learned scales do not, whatever their names."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if loss.device.type == "cpu" and not torch.isfinite(loss):
            step = self.state.global_step + 1
            self.guard.see_layers(hidden_state_rows(self._plain(model), inputs["input_ids"], step))
            self.guard.see_loss(step, float(loss))
        return loss


class RunRecorder(TrainerCallback):
    """Writes metrics.jsonl and layers/, shows progress, feeds the guard, and ends a run on Ctrl-C.

    ``progress`` is called with (step, latest loss) after every step.
    """

    def __init__(
        self,
        *,
        metrics: MetricsWriter,
        layers: LayersWriter,
        guard: DivergenceGuard,
        monitor_ids: torch.Tensor,
        tokens_per_step: int,
        bits_per_byte: Callable[[float], float],
        unigram_entropy: float,
        bar: bool,
    ):
        self.metrics, self.layers, self.guard = metrics, layers, guard
        self.monitor_ids, self.tokens_per_step = monitor_ids, tokens_per_step
        self.bits_per_byte, self.unigram_entropy = bits_per_byte, unigram_entropy
        self.show_bar, self.bar = bar, None
        self.interrupted: str | None = None
        self.trainer: LaminaTrainer | None = None
        self.best_eval = self.last_eval = math.inf
        self.training_seconds = 0.0
        self._parent = os.getppid()
        self._mark: tuple[int, float] | None = None
        self._flushed = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, unit="step", disable=not self.show_bar, dynamic_ncols=True
        )
        if state.global_step == 0:
            self._monitor(0, [])
        self._mark = (state.global_step, time.monotonic())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(1)
        if os.getppid() != self._parent:
            self.interrupted = "the process that started it is gone"
        if self.interrupted:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        step, now = state.global_step, time.monotonic()
        first, since = self._mark or (step, now)
        rate = (step - first) * self.tokens_per_step / max(now - since, 1e-9)
        self.training_seconds += now - since
        loss, norm = float(logs["loss"]), float(logs.get("grad_norm", math.nan))
        record = {"step": step, "tokens": step * self.tokens_per_step, "loss": loss}
        record |= {"learning_rate": logs.get("learning_rate"), "grad_norm": norm, "tokens_per_second": rate}
        self.metrics.write(record)
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        assert self.trainer is not None
        self._monitor(step, self.trainer.layer_rows)
        self.guard.see_loss(step, loss)
        self._mark = (step, time.monotonic())  # evaluation, monitor and checkpoints are not the training's time

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kw: Any
    ) -> None:
        loss = float((metrics or {}).get("eval_loss", math.nan))
        self.last_eval, self.best_eval = loss, min(self.best_eval, loss) if loss == loss else self.best_eval
        record = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step, "eval_loss": loss}
        self.metrics.write({**record, "perplexity": safe_exp(loss), "bits_per_byte": self.bits_per_byte(loss)})
        if self._mark is not None:
            self._mark = (state.global_step, time.monotonic())

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.layers.flush()
        self._mark = (state.global_step, time.monotonic())

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Write what has gathered and take the progress bar away; may be called twice."""
        self.layers.flush()
        if self.bar is not None:
            self.bar.close()

    def _monitor(self, step: int, gradients: list[Row]) -> None:
        assert self.trainer is not None
        model = self.trainer._plain(self.trainer.model)  # type: ignore[arg-type]
        device = next(model.parameters()).device
        states = hidden_state_rows(model, self.monitor_ids.to(device), step)
        self.guard.see_layers(states)
        rows = [*gradients, *states, *gain_rows(model, step)]
        self.layers.add(rows)
        if time.monotonic() - self._flushed > 30:
            self.layers.flush()
            self._flushed = time.monotonic()
        if self.trainer.args.report_to:
            logs = {f"layers/{m}/{layer:04d}.{sub}.{role}": v for _, layer, sub, role, _, m, v in rows}
            handler, trainer = self.trainer.callback_handler, self.trainer
            handler.on_log(trainer.args, trainer.state, trainer.control, logs)


def safe_exp(loss: float) -> float:
    """The perplexity of a loss in nats; infinite where it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@contextmanager
def stop_signals(recorder: RunRecorder) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after the step it is in, with a checkpoint; the second at once."""

    def stop(number: int, frame: Any) -> None:
        if recorder.interrupted:
            raise KeyboardInterrupt
        recorder.interrupted = f"stopped by {signal.Signals(number).name}"

    old: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread: whoever runs us handles signals
        pass
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
