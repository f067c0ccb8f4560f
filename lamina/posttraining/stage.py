"""The jobs after pretraining as data: what each of them reads, trains and measures."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from lamina.core.json_types import Json
from lamina.data.blocks import spread
from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.posttraining.settings import TuningSettings
from lamina.posttraining.starting import Start
from lamina.posttraining.trainer import Parts, Passed, TunedTrainer
from lamina.training.arguments import arguments_of
from lamina.training.execution.processes import Processes
from lamina.training.optimization.order import TrainOrder

if TYPE_CHECKING:
    from datasets import Dataset

S = TypeVar("S", bound=TuningSettings)
T = TypeVar("T")
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What a job trains on and is evaluated on.

    Attributes:
        train: encoded examples.
        held_out: those of an evaluation.
        monitored: token ids [sequences, tokens] for the layer monitor.
        fingerprint: a hash of all of them.
        notes: counts for result.json.
    """

    train: Dataset
    held_out: Dataset
    monitored: torch.Tensor
    fingerprint: str
    notes: Json = field(default_factory=dict)

    def steps(self, settings: TuningSettings) -> int:
        """The optimizer steps of the settings' epochs, at least one."""
        per_step = settings.batch_size * settings.gradient_accumulation
        return settings.steps or max(1, math.ceil(settings.epochs * len(self.train) / per_step))


@dataclass(frozen=True, kw_only=True)
class Setup(Generic[S]):
    """What a job's trainer is made of."""

    settings: S
    start: Start
    examples: Examples
    model: PreTrainedModel
    callbacks: list[TrainerCallback]
    processes: Processes

    @property
    def folder(self) -> Path:
        """The run's."""
        return Path(str(self.settings.output))

    def trainer_options(self, arguments: TrainingArguments, parts: Parts) -> Json:
        """What all of TRL's trainers take, with Lamina's part."""
        return {
            "model": self.model,
            "args": arguments,
            "train_dataset": self.examples.train,
            "eval_dataset": self.examples.held_out,
            "processing_class": self.start.tokenizer,
            "callbacks": self.callbacks,
            "parts": parts,
        }


class Stage(ABC, Generic[S]):
    """A job after pretraining.

    Attributes:
        kind: of its folder.
        settings: the record of its settings.
        head: the name of the trained model's head.
        guarded: whether its loss, in nats, is watched for divergence; else only whether it is finite.
        measure: the metric of an evaluation by which the run is judged.
    """

    kind: Kind
    settings: type[S]
    head: str = "causal_lm"
    guarded: bool = True
    measure: str = "eval_loss"

    @abstractmethod
    def examples(self, settings: S, start: Start) -> Examples:
        """Read and encode the data. Raises UserError."""

    def model(self, settings: S, start: Start) -> PreTrainedModel:
        """The model to train."""
        return start.policy()

    def order(self, settings: S, examples: int, **options: Passed) -> TrainOrder:
        """Which examples each step trains on."""
        return TrainOrder(examples, **options)

    @abstractmethod
    def trainer(self, setup: Setup[S], parts: Parts) -> TunedTrainer:
        """TRL's trainer of the job."""

    def others(self, settings: S, start: Start) -> str:
        """A hash of what else the job reads (a reward model); checked before the data are read."""
        return ""

    def finish(self, setup: Setup[S], trainer: TunedTrainer) -> Json:
        """What result.json holds beside the numbers that all jobs have; may write files into the run's folder."""
        return {}


A = TypeVar("A", bound=TrainingArguments)


def arguments_for(kind: type[A], setup: Setup[S], **own: object) -> A:
    """TRL's arguments for a job's settings, with fields of the job's ``own``. Raises UserError."""
    # TRL turns checkpointing on by default, under the name that transformers had for it before 5.23
    checkpointing = {"gradient_checkpointing": setup.settings.gradient_checkpointing}
    return arguments_of(kind, setup.settings.as_run(), setup.processes.size, **checkpointing, **own)


def split(rows: Sequence[Row], settings: TuningSettings, held_out: Sequence[Row] | None) -> tuple[list[Row], list[Row]]:
    """The rows to train on and those of an evaluation; without ``held_out``, a fixed share of the rows is held out.

    The share does not depend on the seed, so that runs of several seeds are evaluated on the same rows. Where it has
    more rows than ``eval_examples``, its others are trained on.
    """
    if held_out is None:
        count = max(1, round(settings.eval_fraction * len(rows)))
        if len(rows) < 2:
            raise UserError("data: one row can't be both trained on and held out (needed: two, or eval_data)")
        places = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        share = _thinned(sorted(places[:count]), settings)
        return [rows[i] for i in sorted(set(range(len(rows))).difference(share))], [rows[i] for i in share]
    return list(rows), _thinned(held_out, settings)


def _thinned(items: Sequence[T], settings: TuningSettings) -> list[T]:
    return [items[i] for i in spread(len(items), settings.eval_examples or len(items))]


def fingerprint(*parts: Sequence[Row]) -> str:
    """A hash of encoded rows."""
    digest = hashlib.sha256()
    for rows in parts:
        for row in rows:
            digest.update(repr(sorted(row.items())).encode())
    return digest.hexdigest()


def monitored(sequences: Sequence[Sequence[int]], count: int = 4) -> torch.Tensor:
    """A few sequences for the layer monitor, cut to the shortest of them: [sequences, tokens]."""
    longest = sorted(sequences, key=len, reverse=True)[:count]
    length = min(map(len, longest))
    return torch.tensor([list(ids[:length]) for ids in longest])
