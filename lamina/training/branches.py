"""Decay branches: from one trunk at a constant rate, the losses of shorter runs that end with a decay.

A run of n steps under warm-up, stable, decay differs from a longer one only from the step on at which its rate begins
to fall. So a branch trains from the trunk's state at that step, over the blocks that follow, with the rate falling as
it would have in the shorter run, and the trunk continues as if nothing had happened (Hägele et al., arXiv 2405.18392,
Section 4).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lamina.core.json_types import Json
from lamina.data.blocks import ItemSource, Splits
from lamina.errors import UserError
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.execution.processes import Processes
from lamina.training.monitor.experts import find_routers
from lamina.training.monitor.recorder import RunRecorder
from lamina.training.objectives.bigram import entropy_of
from lamina.training.optimization.optimizer import warmup_stable_decay
from lamina.training.optimization.order import TrainOrder, order_of
from lamina.training.setting_groups import in_steps
from lamina.training.settings import PretrainSettings


class Branches(TrainerCallback):
    """Trains each branch at the step where it leaves the trunk, and records its loss in metrics.jsonl.

    Args:
        settings: of the trunk.
        model: that it trains.
        splits: its data; ``items`` are those it trains on, in the form that the order names.
        order: of the trunk's blocks.
        recorder: writes the records.
        processes: this process and the run's others.

    Attributes:
        rows: the branches that have ended: ``branch_steps``, ``tokens``, ``branch_loss`` and
            ``branch_bigram_entropy``, the loss of a table of the pairs of tokens in the branch's blocks.
        trainer: of the trunk; set before the training begins.

    Raises:
        UserError: for branches in several processes, or of a model with experts.
    """

    def __init__(
        self,
        settings: PretrainSettings,
        model: nn.Module,
        *,
        splits: Splits,
        items: ItemSource,
        order: TrainOrder,
        recorder: RunRecorder,
        processes: Processes,
    ):
        self.settings, self.splits, self.items = settings, splits, items
        self.order, self.recorder = order, recorder
        self.rows: list[Json] = []
        self.trainer: Any = None
        if settings.branches is None:
            return
        if processes.size > 1:
            raise UserError(f"branches: {settings.branches!r} in {processes.size} processes (allowed: one)")
        if find_routers(model):
            raise UserError(f"branches: {settings.branches!r} with experts (allowed: a dense backbone)")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        settings = self.settings
        for steps in settings.branch_steps():
            if state.global_step == steps - in_steps(settings.decay, steps) and not self._has(steps):
                row = {"branch_steps": steps, "tokens": steps * self.recorder.tokens_per_step, **self._train(steps)}
                self.rows.append(row)
                self.recorder.metrics.write({"step": state.global_step, **row})

    def _has(self, steps: int) -> bool:
        return any(row["branch_steps"] == steps for row in self.rows)

    def _train(self, steps: int) -> Json:
        """Train the branch that ends after ``steps``, evaluate it, and put back the trunk's state."""
        trainer = self.trainer
        model, optimizer = trainer.model, trainer.optimizer
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        averages = copy.deepcopy(optimizer.state_dict())
        with torch.random.fork_rng():
            self._decay(steps)
            with trainer.compute_loss_context_manager():
                loss = trainer.evaluation_loop(
                    trainer.get_eval_dataloader(), "evaluation", prediction_loss_only=True
                ).metrics["eval_loss"]
        model.load_state_dict(weights)
        optimizer.load_state_dict(averages)
        model.train()
        table = entropy_of(self.splits, self.settings, self.order, steps)
        return {"branch_loss": float(loss), "branch_bigram_entropy": table}

    def _decay(self, steps: int) -> None:
        """Take the branch's own steps, from the trunk's next one to ``steps``."""
        settings, trainer = self.settings, self.trainer
        model, optimizer = trainer.model, trainer.optimizer
        decay, begun = in_steps(settings.decay, steps), trainer.state.global_step
        order = order_of(settings, self.items, done=begun)
        order.steps = steps
        batches = (trainer.data_collator([self.items[index] for index in batch]) for batch in order)
        for done in range(begun, steps):
            share = warmup_stable_decay(
                done, warmup=0, decay=decay, steps=steps, low=settings.min_learning_rate, shape=settings.decay_shape
            )
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            model.train()
            micro_batches, predicted = trainer.get_batch_samples(
                batches, settings.gradient_accumulation, trainer.args.device
            )
            for inputs in micro_batches:
                Trainer.training_step(trainer, model, inputs, predicted)  # the trainer's own would join the records
            if settings.max_grad_norm:
                trainer.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> Json:
        """The branches that have ended."""
        return {"branches": self.rows}

    def load_state_dict(self, state: RunState) -> None:
        """Resume with a checkpoint's branches."""
        self.rows = list(state.get("branches", []))
