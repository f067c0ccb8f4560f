"""The weights of the best evaluation, kept beside the checkpoints."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.core.json_types import Json
from lamina.jobs.files import write_json, writing
from lamina.training.checkpointing.checkpoints import Checkpoints
from lamina.training.execution.processes import Processes

logger = logging.getLogger(__name__)

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
        noted = _noted(folder / NOTE, resumed)
        if noted is not None and not (folder / WEIGHTS).is_file():
            if processes.first:
                logger.warning("%s is missing: the best evaluation up to step %d is lost", folder / WEIGHTS, resumed)
            noted = None
        self.step, self.loss = (-1, math.inf) if noted is None else (int(noted["step"]), float(noted["loss"]))
        self.metrics: Json = {} if noted is None else dict(noted.get("metrics", {}))

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
        """Put the best weights into the model; returns what result.json says of them."""
        if self.step < 0:
            return {}
        stored = load_file(self.folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self._trained().items():
                parameter.copy_(stored[name])
        return {**self.metrics, "best_step": self.step, "eval_loss": self.loss}

    def forget(self) -> None:
        """Delete the copies of a run without checkpoints: with one, a damaged model is made again from the copies."""
        if not Checkpoints(self.folder / "checkpoints").paths():
            for name in (NOTE, WEIGHTS):
                (self.folder / name).unlink(missing_ok=True)


def _noted(path: Path, last: int) -> Json | None:
    """What is noted of the best evaluation; None where nothing is, or only of one after the step ``last``."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return noted if "loss" in noted and noted["step"] <= last else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
