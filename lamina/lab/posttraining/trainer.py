"""Add Lamina's checkpoints, data order, divergence guard and layer monitor to TRL's trainers."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import PreTrainedConfig, TrainingArguments

from lamina.core.json_types import Json
from lamina.errors import UserError, one_line, unknown
from lamina.jobs.aliases import meaning
from lamina.probes.structure.hooks import evaluating
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.run import TrainingRun
from lamina.training.trainer import RunTrainer

T = TypeVar("T")
C = TypeVar("C", bound=TrainingArguments)
# TRL's arguments that Lamina rejects, and why.
_REFUSED = {
    r"model_init_kwargs|trust_remote_code|pad_token": "Lamina takes the model and its tokenizer from --from",
    r"dataset_kwargs|shuffle_dataset|eval_packing": "Lamina orders the rows, so that a run resumes exactly",
    r"sync_ref_model|ref_model_\w+": "Lamina's records and checkpoints need a reference model that does not change",
    r"num_generations_eval": "an evaluation samples one answer per held-out prompt",
    r"generation_batch_size": "trl.steps_per_generation determines the batch size",
    r"log_\w+": "Lamina already writes held_out.jsonl and metrics.jsonl",
}
Passed: TypeAlias = Any
"""An argument or a result of TRL's trainer, which Lamina passes on unchanged."""


def check_trl(options: Json, kind: type[C], offered: Collection[str]) -> C:
    """Build the configuration of TRL's trainer. Raises UserError for an argument that TRL or Lamina rejects."""
    # the names of the job's settings
    offered = set(offered)
    trainer_fields = {entry.name for entry in fields(TrainingArguments)}
    names = {entry.name for entry in fields(kind)}
    refused = {name: why for pattern, why in _REFUSED.items() for name in names if re.fullmatch(pattern, name)}
    for name in options:
        flag = name if name in offered - {"epsilon"} else meaning(name, offered, near=True)  # TRL's epsilon clips
        if name in trainer_fields or (name in names and flag is not None):
            flag = f"trainer.{name}" if flag in (None, "trainer") else flag.replace("_", "-")
            raise UserError(f"trl.{name}: --{flag} sets this argument. Use --{flag}.")
        if name in refused:
            raise UserError(f"trl.{name}: {refused[name]}. Leave out trl.{name}.")
        if name not in names:
            raise unknown("trl argument", name, names - trainer_fields - refused.keys())
    try:
        checkpointing = (
            "activation" if "activation_checkpointing" in trainer_fields else "gradient"
        )  # before transformers 5.23
        fixed = {"output_dir": "none", "use_cpu": True, "bf16": False, "report_to": "none"}
        fixed |= {"max_length": None} if "max_length" in names else {}
        return kind(**fixed, **{f"{checkpointing}_checkpointing": False}, **options)
    except Exception as error:  # TRL's checks raise many types
        raise UserError(f"trl: {one_line(error)}") from None


class NoReference(nn.Module):
    """A placeholder for TRL's reference model. With LoRA, the reference is the policy without its LoRA matrices."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config


class TunedTrainer(RunTrainer):
    """Add Lamina's checkpoints, data order, divergence guard and layer monitor to a TRL trainer.

    Args:
        schedule: a function from the number of finished steps to a fraction of the peak learning rate, or None to use
            the schedule in the trainer's arguments.

    Attributes:
        tokens_before: the number of training tokens before the run resumed.
    """

    tokens_before: int = 0
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int = 0

    def __init__(self, *args: Passed, run: TrainingRun, schedule: Callable[[int], float] | None, **kwargs: Passed):
        self.processes, self.guard, self.order, self.states = run.processes, run.guard, run.order, run.states
        stage: Passed = run.stage  # a TuningStage
        self.schedule, self.trl, self.tuner = schedule, getattr(run.settings, "trl", {}), stage.tuner
        self.watched = stage.watched
        super().__init__(*args, **kwargs)
        self.keep_sharded()

    def _send_telemetry(self) -> None:
        """Turn off TRL's telemetry."""

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Do nothing, because Lamina's checkpoints have no model card."""

    def training_step(self, *args: Passed, **kwargs: Passed) -> torch.Tensor:
        with self._arguments_told():
            loss = super().training_step(*args, **kwargs)
        if (value := self.failed_loss(loss)) is not None:
            self.guard.see_loss(self.state.global_step + 1, value)
        return loss

    @contextmanager
    def _arguments_told(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if not self.trl or isinstance(error, UserError):
                raise
            raise UserError(f"trl: {one_line(error)}") from error

    def state_dict(self) -> Json:
        """Return the trainer's state, with the metrics that TRL has collected since the last record."""
        counts = {"train_tokens": self.tokens_seen, "measured": dict(self._metrics["train"])}
        return {**super().state_dict(), **counts}

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        self._total_train_tokens = self.tokens_before = int(state.get("train_tokens", 0))
        for name, values in state.get("measured", {}).items():
            self._metrics["train"][name] = list(values)

    @property
    def tokens_seen(self) -> int:
        """The number of training tokens so far, over all processes."""
        return int(self._total_train_tokens)

    def evaluate(self, *args: Passed, **kwargs: Passed) -> dict[str, float]:
        """Measure every held-out example exactly once, and log the metrics."""
        with self._arguments_told():
            metrics = self.held_out()
        self.evaluation = self.watched.measure(self)
        with evaluating(self.bare_model()):  # in training mode, TRL would log and clear its training metrics
            self.log(metrics)  # TRL adds its own metrics
        metrics.update(self.state.log_history[-1])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @abstractmethod
    def held_out(self) -> dict[str, float]:
        """Return the metrics on the held-out examples. The names of the metrics begin with "eval_"."""

    def held_out_batches(
        self, measure: Callable[[list[int]], T], count: int | None = None, size: int | None = None
    ) -> list[T]:
        """Measure the items of this process in batches, and return the result of each batch."""
        data: Passed = self.eval_dataset
        # by default, all held-out examples in batches of the evaluation's size
        number, processes = len(data) if count is None else count, self.processes
        mine = range(processes.rank, number, processes.size)
        size = size or max(1, self.args.per_device_eval_batch_size)
        # a sharded model needs all processes, so a process without items measures item 0
        starts = range(0, math.ceil(number / processes.size) if self.sharded else len(mine), size)
        with torch.no_grad(), evaluating(self.bare_model()):
            measured = [measure(list(mine[at : at + size]) or [0]) for at in starts]
        return measured[: math.ceil(len(mine) / size)]

    def without_adapters(self, **inputs: Passed) -> Passed:
        """Call the model with its LoRA matrices turned off, which gives the initial model's outputs."""
        tuner = self.tuner
        assert tuner is not None
        tuner.disable_adapter_layers()
        try:
            with torch.no_grad(), evaluating(self.bare_model()):
                return self.in_precision(**inputs)
        finally:
            tuner.enable_adapter_layers()

    def in_precision(self, **inputs: Passed) -> Passed:
        """Call the model in the run's mixed precision, even before accelerate wraps the model."""
        with self.accelerator.autocast():
            outputs = self.bare_model()(**inputs)
        return convert_to_fp32(outputs) if self.accelerator.native_amp else outputs

    def bare_model(self) -> Passed:
        """Return the model without the wrappers of accelerate and DDP, but with its LoRA matrices."""
        assert isinstance(self.model, nn.Module)
        return self.accelerator.unwrap_model(self.model)
