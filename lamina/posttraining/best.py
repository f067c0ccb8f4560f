"""The weights of the best evaluation, kept beside the checkpoints until the run ends."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.core.json_types import Json
from lamina.jobs import digests
from lamina.jobs.files import write_json, writing
from lamina.training.execution.processes import Processes

WEIGHTS, NOTE = "best.safetensors", "best.json"


class BestWeights(TrainerCallback):
    """Keeps the trained weights of the evaluation with the lowest held-out loss.

    Args:
        folder: the run's.
        model: being trained.
        processes: the first of them writes.
        resumed: the step that the run resumes from; a later best one is forgotten, since it comes again.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, processes: Processes, *, resumed: int):
        self.folder, self.model, self.processes = folder, model, processes
        noted = _noted(folder / NOTE)
        known = noted is not None and noted["step"] <= resumed and not digests.differs(folder / WEIGHTS)
        self.step, self.loss = (int(noted["step"]), float(noted["loss"])) if known and noted else (-1, math.inf)
        self.metrics: Json = dict(noted.get("metrics", {})) if known and noted else {}

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Json | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the weights if none were better."""
        loss = float((metrics or {}).get("eval_loss", math.nan))
        if not loss < self.loss:
            return
        self.step, self.loss = state.global_step, loss
        # Trainer's epoch is among them, and is not that of Lamina's order
        own = {name: value for name, value in (metrics or {}).items() if name.startswith("eval_")}
        self.metrics = {name: v for name, v in own.items() if isinstance(v, int | float) and math.isfinite(v)}
        self.processes.by_first(self._write)

    def _write(self) -> None:
        tensors = {name: p.detach().cpu().contiguous() for name, p in self._trained().items()}
        with writing(self.folder / WEIGHTS) as temporary:
            save_file(tensors, temporary)
        write_json(self.folder / NOTE, {"step": self.step, "loss": self.loss, "metrics": self.metrics})

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def restore(self) -> Json:
        """Put the best weights into the model and delete the copies; returns what result.json says of them."""
        if self.step < 0:
            return {}
        stored = load_file(self.folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self._trained().items():
                parameter.copy_(stored[name])
        return {**self.metrics, "best_step": self.step, "eval_loss": self.loss}

    def forget(self) -> None:
        """Delete the copies, once the model is saved."""
        for name in (WEIGHTS, NOTE):
            digests.remove(self.folder / name)


def _noted(path: Path) -> Json | None:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return noted if {"step", "loss"} <= set(noted) else None
    except (OSError, ValueError, TypeError):
        return None
