"""The order of the data, the weights that decay and the schedule, for Trainer and for TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from lamina.training.optimization.order import TrainOrder

_Trainer = Trainer if TYPE_CHECKING else object  # a mixin: the class that uses it chooses the trainer


class OrderedTrainer(_Trainer):
    """A mixin for Trainer and TRL's trainers: Lamina's training order, weight decay and schedules.

    Attributes:
        order: which examples each step trains on; None for the trainer's own sampler.
        schedule: the share of the peak learning rate by steps done; None for the arguments' own schedule.
    """

    order: TrainOrder | None = None
    schedule: Callable[[int], float] | None = None

    def get_train_dataloader(self) -> DataLoader:
        """The blocks of the training order, loaded as the arguments say."""
        if self.order is None:
            return super().get_train_dataloader()
        workers = self.args.dataloader_num_workers
        return DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=self.order,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            persistent_workers=self.args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            generator=torch.Generator().manual_seed(self.args.seed),  # else it draws from the model's random state
        )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; gains, biases and learned scales do not, whatever their names."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Trainer's schedule, or the run's own."""
        if self.lr_scheduler is None and self.schedule is not None:
            chosen: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.schedule)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)
