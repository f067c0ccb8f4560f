"""Write and read a checkpoint: a Trainer's weights, optimizer and run state.

Runs in one process or with DDP write a model.safetensors that transformers can load, and optimizer/states.safetensors.
Runs with FSDP2 write one safetensors file per process into model/ and optimizer/. Any number of processes can read both
kinds of checkpoints.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Trainer

from lamina.core.json_types import Json
from lamina.jobs.manifest import listed
from lamina.modeling.processes import Processes
from lamina.training.checkpointing import sharding
from lamina.training.checkpointing.checkpoints import RUN_STATE
from lamina.training.optimization.optimizer import AVERAGE, WeightAverage

logger = logging.getLogger(__name__)


def write(
    trainer: Trainer,
    processes: Processes,
    folder: Path,
    state: Json,
    average: WeightAverage | None = None,
    *,
    copied: bool = False,
) -> Callable[[], None]:
    """Write this process's part of a checkpoint, except the tensors. Return a function that writes the tensors.

    If one process fails, all processes raise the error. With ``copied``, this function copies the tensors to the CPU
    now, so that another thread can write them later.
    """
    model = bare(trainer)
    sharded, writes = sharding.is_sharded(model), processes.first
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)

    def gathered() -> tuple[list[sharding.Tensors], Json]:
        states, rest = sharding.optimizer_tensors(model, optimizer)
        ours = sharded or sharding.is_only_trained(model)
        weights = sharding.model_tensors(model) if ours else model.state_dict()
        parts = [weights, states, {} if average is None else average.tensors()]
        if copied:
            parts = [sharding.copies(part) if sharded or writes else {} for part in parts]
        return parts, rest

    (weights, states, averaged), rest = processes.together(gathered)

    def small_files() -> None:
        trainer._save_rng_state(str(folder))
        if writes:
            _write_rest(trainer, folder, rest, state)

    def whole_files() -> None:
        if not writes:
            return
        if sharding.is_only_trained(model):
            model.config.save_pretrained(folder)
            sharding.write_whole(weights, folder / "model")
        elif not sharded:
            model.save_pretrained(folder, state_dict=weights)
        if not sharded:
            sharding.write_whole(states, folder / "optimizer")
        if averaged:
            save_file({name: tensor.detach().contiguous() for name, tensor in averaged.items()}, folder / AVERAGE)

    def tensor_files() -> None:
        processes.together(whole_files)
        if sharded:
            sharding.write_shards(weights, folder / "model", processes.group if copied else None)
            sharding.write_shards(states, folder / "optimizer", processes.group if copied else None)

    processes.together(small_files)
    return tensor_files


def _write_rest(trainer: Trainer, folder: Path, rest: Json, state: Json) -> None:
    """Write the tokenizer and the states of run, Trainer, schedule and loss scaler.

    ``rest`` is the optimizer's state without tensors.
    """
    torch.save(rest, folder / "optimizer.pt")
    schedule: Any = trainer.lr_scheduler
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    trainer._save_scaler(str(folder))
    if (processor := getattr(trainer, "processor", None)) is not None:
        processor.save_pretrained(folder)
    callbacks = cast(dict[str, object], trainer.state.stateful_callbacks)
    callbacks[type(trainer.control).__name__] = trainer.control.state()
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    (folder / RUN_STATE).write_text(json.dumps(state), encoding="utf-8")


def bare(trainer: Trainer) -> PreTrainedModel:
    """Return the model without the wrappers of accelerate and DDP."""
    assert trainer.model is not None
    return trainer.accelerator.unwrap_model(trainer.model)


def read_model(trainer: Trainer, processes: Processes, checkpoint: Path) -> None:
    """Load a checkpoint's weights into the trainer's model. Raises UserError for another model's checkpoint."""
    model = bare(trainer)
    files = _tensor_files(checkpoint, "model") or _tensor_files(checkpoint, ".")
    tensors = sharding.model_tensors(model)
    processes.together(lambda: sharding.check_shapes(tensors, files, checkpoint))
    sharding.read_tensors(tensors, files, alone=not sharding.is_sharded(model))
    sharding.set_scalars(model, tensors)


def _tensor_files(checkpoint: Path, folder: str) -> list[Path]:
    """Return the safetensors files in one folder of a checkpoint, as the checkpoint's manifest lists them."""
    names = [Path(name) for name in listed(checkpoint)]
    return [checkpoint / name for name in names if name.suffix == ".safetensors" and name.parent == Path(folder)]


def read_optimizer(trainer: Trainer, checkpoint: Path) -> None:
    """Restore the optimizer and the schedule. Raises UserError for another model's checkpoint."""
    model = bare(trainer)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    rest = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    alone = not sharding.is_sharded(model)
    sharding.load_optimizer(model, optimizer, _tensor_files(checkpoint, "optimizer"), rest, alone=alone)
    schedule: Any = trainer.lr_scheduler
    schedule.load_state_dict(torch.load(checkpoint / "scheduler.pt", weights_only=True))


def scale_learning_rate(trainer: Trainer, factor: float) -> None:
    """Multiply the current and all later learning rates of each parameter group by a factor."""
    schedule: Any = trainer.lr_scheduler
    for group in schedule.optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor
    schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
    schedule._last_lr = [rate * factor for rate in schedule._last_lr]


def renew_random_state(trainer: Trainer, processes: Processes, checkpoint: Path, step: int) -> None:
    """Seed the random generators if the number of processes changed. Without a change, Trainer restores the states."""
    name = f"rng_state_{processes.rank}.pth" if processes.size > 1 else "rng_state.pth"
    written = sum(name.startswith("rng_state") for name in listed(checkpoint))
    if written == processes.size and (checkpoint / name).is_file():
        return
    if processes.first:
        logger.warning(
            "%s was written by %d processes, but this run has %d processes. Lamina redistributes the optimizer and "
            "weights, but dropout draws different random numbers in the new processes",
            checkpoint, written, processes.size,
        )  # fmt: skip
    seed = trainer.args.seed + 1_000_003 * (step + 1)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
