"""An exponential moving average of the weights (Polyak and Juditsky 1992), kept by torch's AveragedModel."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.errors import UserError

AVERAGE = "average.safetensors"
_STEPS = "steps"


class WeightAverage(TrainerCallback):
    """The average after step t: decay * average + (1 - decay) * weights; after the first step, the weights.

    Args:
        model: before its first step; it is copied.
        decay: below 1.
    """

    def __init__(self, model: PreTrainedModel, decay: float):
        self.trained, self.averaged = model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    @property
    def model(self) -> PreTrainedModel:
        """The model with the averaged weights, on the trained model's device."""
        self._follow()
        return cast(PreTrainedModel, self.averaged.module)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Average the weights of the step."""
        self._follow()
        self.averaged.update_parameters(self.trained)

    def _follow(self) -> None:
        """Move to the trained model's device: Trainer moves that model after it was copied, also without a step."""
        device = next(self.trained.parameters()).device
        if next(self.averaged.parameters()).device != device:
            torch.nn.Module.to(self.averaged, device)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), _STEPS: self.averaged.n_averaged}

    def write(self, folder: Path) -> None:
        """Write the average into a checkpoint."""
        save_file({name: tensor.detach().contiguous() for name, tensor in self._tensors().items()}, folder / AVERAGE)

    def read(self, folder: Path) -> None:
        """Go on with a checkpoint's average. Raises UserError for a checkpoint without one."""
        if not (folder / AVERAGE).is_file():
            raise UserError(f"ema_decay: {str(folder)!r} holds no averaged weights (allowed: 0)")
        stored = load_file(folder / AVERAGE)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(stored[name])
            for own, trained in zip(self.model.buffers(), self.trained.buffers(), strict=True):
                own.copy_(trained)  # such as an experts' bias: it is not averaged
