"""Probes on a model while it trains: on a few held-out blocks, and without the training noticing."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from lamina.probes.context import Context
from lamina.training import folder as run_folder

if TYPE_CHECKING:
    import pandas as pd
    from transformers import Trainer

    from lamina.probes.structure import Structure
    from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)


class ScheduledProbes(TrainerCallback):
    """Runs probes at the first step, at every ``every``-th and at the last; RUN/probes/NAME/part-STEP.parquet.

    A probe that has no meaning for the model is left out from then on, one that fails at a step says so in
    probes/NAME/notes.jsonl; neither ends the run. In a run of several processes the first one probes; a model whose
    weights are spread over processes is not probed.
    """

    def __init__(
        self,
        folder: Path,
        settings: PretrainSettings,
        input_ids: torch.Tensor,
        tokenizer: Any,
        resumed_step: int | None,
    ):
        self.folder, self.specs, self.every = folder / "probes", settings.probes, settings.probe_every
        self.input_ids, self.tokenizer = input_ids, tokenizer
        self.trainer: Trainer | None = None
        self.seconds = 0.0
        self._structure: Structure | None = None
        self._left_out: set[str] = set()
        if resumed_step is not None:
            forget(self.folder, after=resumed_step)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._probe(state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Trainer has stepped and cleared the gradients by now, and the recorder, called before, has stopped its clock.
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._probe(state)

    def _probe(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        assert self.trainer is not None
        began, step = time.monotonic(), state.global_step
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)  # pyright: ignore[reportArgumentType]
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            self._note("all", step, "the weights are spread over several processes: nothing is probed")
            return
        with undisturbed(model):
            for name, frame, notes in self._measure(model, step):
                for note in notes:
                    self._note(name, step, note)
                if frame is not None:
                    write_part(self.folder / name, step, frame)
        self.seconds += time.monotonic() - began

    def _measure(self, model: nn.Module, step: int) -> Iterator[tuple[str, pd.DataFrame | None, Sequence[str]]]:
        from lamina.probes import registry
        from lamina.probes.wiring import find_structure

        inputs = {"input_ids": self.input_ids.to(next(model.parameters()).device)}
        if self._structure is None:
            self._structure = find_structure(model, {k: v[:1] for k, v in inputs.items()})
        probes = [one for one in registry.make_all(self.specs) if one.name not in self._left_out]
        context = Context(
            model=model,
            base=getattr(model, "base_model", model),
            structure=self._structure,
            batches=[inputs],
            tokenizer=self.tokenizer,
            state={"step": step},
        )

    def _note(self, name: str, step: int, note: str) -> None:
        logger.warning("probe %s, step %d: %s", name, step, note)
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        with (self.folder / name / "notes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "note": note}) + "\n")


def write_part(folder: Path, step: int, frame: pd.DataFrame) -> None:
    """Write one step's rows under a temporary name, then put them into place."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part-{step:08d}.parquet"
    frame.assign(step=step)[["step", *frame.columns.drop("step", errors="ignore")]].to_parquet(
        path.with_name(f".{path.name}"), index=False
    )
    os.replace(path.with_name(f".{path.name}"), path)


def forget(folder: Path, *, after: int) -> None:
    """Drop what was measured after a step that a run goes on from."""
    for path in folder.glob("*/part-*.parquet"):
        if int(path.stem.split("-")[1]) > after:
            path.unlink()
    for path in folder.glob("*/notes.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step(line) <= after]
        run_folder.write_text(path, "".join(f"{line}\n" for line in kept))


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a torn last line goes


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, eager, no gradients held; afterwards mode, gradients and random states are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    compiled = [(module, module._compiled_call_impl) for module, _ in modes if module._compiled_call_impl is not None]
    held = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    states = random.getstate(), np.random.get_state()
    devices = {p.device for p, _, _ in held if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index for d in devices]):
        model.eval()
        for module, _ in compiled:  # a compiled module would not call the hooks inside it
            module._compiled_call_impl = None
        for parameter, _, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, call in compiled:
                module._compiled_call_impl = call
            for parameter, gradient, requires in held:
                parameter.requires_grad_(requires)
                parameter.grad = gradient
            random.setstate(states[0])
            np.random.set_state(states[1])
