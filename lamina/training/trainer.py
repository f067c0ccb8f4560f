"""Trainers that record the layers' gradient norms, stop diverged runs, and write Lamina's checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput

from lamina.core.json_types import Json
from lamina.modeling.parts import decaying, one_sequence_each, uncompiled
from lamina.modeling.processes import Processes
from lamina.modeling.scaling import StepFactors
from lamina.probes.structure.hooks import evaluating
from lamina.training.checkpointing import sharding
from lamina.training.checkpointing import state as saving
from lamina.training.checkpointing.checkpoints import Background, Checkpoints, RunState, Stateful, collected
from lamina.training.monitor.experts import ExpertBalance
from lamina.training.monitor.guard import DivergenceGuard
from lamina.training.monitor.recorder import MonitoredTrainer
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.monitor.writers import LastEvaluation
from lamina.training.objectives.objective import Collate
from lamina.training.optimization.optimizer import MuonAdamW, WeightAverage, parameter_groups
from lamina.training.optimization.order import TrainOrder


class RunTrainer(MonitoredTrainer):
    """Add the layer monitor, checkpoints, training order and schedules to Trainer and TRL's trainers.

    Attributes:
        guard: the divergence guard, which checks the loss and gradient norm of every step. On a GPU, the guard checks
            all steps since the last record at once.
    """

    states: Sequence[Stateful] = ()  # further objects with a state that checkpoints store
    processor: Any = None  # the tokenizer or image processor, which checkpoints store beside the weights
    # a function that decides from an old checkpoint's run state whether to keep the checkpoint
    keep_also: Callable[[Json], bool] | None = None
    rate_factor: float = 1.0  # the factor on all learning rates after rollbacks
    # the moving average of the weights, which checkpoints store and evaluations use
    average: WeightAverage | None = None
    # the thread that writes checkpoints, or None if training waits for each checkpoint
    background: Background | None = None
    sharded: bool = False  # whether each process holds only a part of the model
    order: TrainOrder | None = None  # the order of the training examples, or None for Trainer's sampler
    # a function from the number of finished steps to a fraction of the peak learning rate, or None for the schedule in
    # the arguments
    schedule: Callable[[int], float] | None = None
    _resumed: RunState = MappingProxyType({})

    def keep_sharded(self) -> None:
        """Set ``sharded``. If the model is sharded, keep Trainer from wrapping the model in DDP."""
        self.sharded = sharding.is_sharded(self.bare_model())
        if self.sharded:
            prepare = self.accelerator.prepare_model
            unwrapped = partial(prepare, device_placement=False, evaluation_mode=True)
            self.accelerator.prepare_model = lambda model, *_, **__: unwrapped(model)  # pyright: ignore

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create Trainer's optimizer, after resharding parameters that an evaluation has gathered."""
        sharding.reshard(self.bare_model())
        optimizer = super().create_optimizer(model)
        self._one_by_one(optimizer)
        return optimizer

    def _one_by_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn off fused and foreach updates under tensor parallelism, where weights are on several device meshes."""
        for group in optimizer.param_groups if self.processes.tensor > 1 else ():
            group.update({name: False for name in ("foreach", "fused") if name in group})

    def training_step(
        self, model: nn.Module, inputs: Json, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        if self.background is not None:
            self.background.look()
        if self.sharded:  # reduce the gradients once per step, not once per micro-batch
            model.set_requires_gradient_sync(self.accelerator.sync_gradients)  # type: ignore[operator]
        return super().training_step(model, inputs, num_items_in_batch)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a complete checkpoint, in the background if possible, and then delete old checkpoints."""
        step, checkpoints = self.state.global_step, Checkpoints(Path(str(self.args.output_dir)))
        background, processes = self.background, self.processes
        if background is not None:
            background.wait()
            processes = background.processes
        own = self.state_dict()
        if not math.isfinite(loss := sum(own["losses"])):  # on a GPU, the guard has not checked every step's loss yet
            self.guard.see_loss(step, loss)
        self.store_flos()
        state = {**own, **collected((*self.states, self.guard))}  # the recorder shows the guard its last steps
        with ExitStack() as opened:
            path = opened.enter_context(checkpoints.save(step, processes))
            tensor_files = saving.write(self, processes, path, state, self.average, copied=background is not None)
            draft = opened.pop_all()

        def finish() -> None:
            with draft:
                tensor_files()
            keep = self.args.save_total_limit or 1
            processes.by_first(lambda: checkpoints.prune(step, keep, self.keep_also))

        if background is None:
            finish()
        else:
            background.begin(finish)

    def state_dict(self) -> Json:
        """Return the trainer's state: losses since the last record, learning rate factor, and overflows."""
        return {
            "step": self.state.global_step,
            "losses": self.processes.everyones(float(self._tr_loss)),
            "logged_step": self._globalstep_last_logged,
            "learning_rate_factor": self.rate_factor,
            "overflows": [self.overflows, self.overflows_in_a_row],
        }

    def load_state_dict(self, state: RunState) -> None:
        """Restore the divergence guard and ``states``. Lamina restores the losses when training begins."""
        self._resumed = state
        self.overflows, self.overflows_in_a_row = state.get("overflows", [0, 0])
        for stateful in (self.guard, *self.states):
            stateful.load_state_dict(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        saving.read_model(self, self.processes, Path(resume_from_checkpoint))
        if self.average is not None:
            self.average.read(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saving.read_optimizer(self, Path(checkpoint))
            self._one_by_one(cast(torch.optim.Optimizer, self.optimizer))
            saving.renew_random_state(self, self.processes, Path(checkpoint), int(self._resumed.get("step", 0)))
            saving.scale_learning_rate(self, self.rate_factor / self._resumed.get("learning_rate_factor", 1.0))

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the run's schedule, with the reduced learning rates after a rollback to step 0."""
        if self.lr_scheduler is None and self.schedule is not None:
            chosen: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.schedule)
            self._created_lr_scheduler = True
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if self._resumed.get("step", -1) < 0 and self.rate_factor != 1:
            saving.scale_learning_rate(self, self.rate_factor)
        return schedule

    def continue_records(self) -> None:
        """Restore the losses of the steps between the run's last record and the checkpoint."""
        losses = self._resumed.get("losses")
        if losses is None or self._resumed["step"] != self.state.global_step:
            return
        same = len(losses) == self.processes.size
        self._tr_loss += losses[self.processes.rank] if same else sum(losses) / len(losses)
        self._globalstep_last_logged = self._resumed["logged_step"]

    def get_train_dataloader(self) -> DataLoader:
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
            # without a generator, the loader would change the model's random state
            generator=torch.Generator().manual_seed(self.args.seed),
        )

    def _prepare_input(self, data: object) -> object:
        """Copy pinned tensors to the GPU asynchronously, because waiting for a copy would leave the GPU idle."""
        if self.args.device.type == "cuda" and isinstance(data, torch.Tensor) and data.is_pinned():
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def _get_num_items_in_batch(self, batch_samples: list[Json], device: torch.device) -> torch.Tensor | int | None:
        """Count the labels. If the labels are on the CPU, copy their count to the GPU asynchronously."""
        first = batch_samples[0] if batch_samples else None
        # a policy's batch samples are lists of rows
        labels = first.get("labels") if isinstance(first, Mapping) else None
        here = device.type == "cuda" and self.args.world_size == 1
        if not here or not isinstance(labels, torch.Tensor) or labels.device.type != "cpu":
            return super()._get_num_items_in_batch(batch_samples, device)
        items = super()._get_num_items_in_batch(batch_samples, labels.device)
        return items.pin_memory().to(device, non_blocking=True) if isinstance(items, torch.Tensor) else items

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decaying(model)


Scores = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""A function that takes logits and labels, and returns scores by name, each a tensor [batch]."""


class LaminaTrainer(RunTrainer, Trainer):
    """The Trainer of pretraining.

    Args:
        experts: the callback that counts and balances the experts' tokens.
        step_factors: each parameter's learning rate factors.
        second: the items of a second corpus. Every evaluation also measures the mean loss on these items.
        collate_eval: the function that collates held-out items (default: ``data_collator``).
        scores: a function that computes further metrics of each held-out item from logits and labels.
        measure_tasks: a function that scores the model on benchmark tasks at every evaluation, in the first process.
    """

    def __init__(
        self,
        *args: Any,
        guard: DivergenceGuard,
        order: TrainOrder | None = None,
        processes: Processes | None = None,
        experts: ExpertBalance | None = None,
        step_factors: dict[str, StepFactors] | None = None,
        schedule: Callable[[int], float] | None = None,
        rate_factor: float = 1.0,
        states: Sequence[Stateful] = (),
        second: Dataset | None = None,
        collate_eval: Collate | None = None,
        scores: Scores | None = None,
        average: WeightAverage | None = None,
        measure_tasks: Callable[[PreTrainedModel], dict[str, float]] | None = None,
        keep_also: Callable[[Json], bool] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.processes = Processes() if processes is None else processes
        self.keep_sharded()
        self.order, self.states, self.keep_also = order, states, keep_also
        self.rate_factor = rate_factor
        self.second, self.measure_tasks = second, measure_tasks
        self.collate_eval, self.scores = collate_eval or self.data_collator, scores
        self.average = average
        if average is not None:
            self.add_callback(average)
        self.step_factors, self.schedule = step_factors, schedule
        self.guard = guard
        self.experts = experts
        if experts is not None:
            self.add_callback(experts)
        self._operations: dict[int, int] = {}  # FLOPs of a micro-batch, by the size of the main input

    def floating_point_ops(self, inputs: Json) -> int:
        """Return Trainer's estimate of the FLOPs. Cache the slow estimate by the input's size."""
        size = inputs[self.bare_model().main_input_name].numel()
        if size not in self._operations:
            self._operations[size] = super().floating_point_ops(inputs)
        return self._operations[size]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create Trainer's optimizer or Muon, with a parameter group for each learning rate."""
        if self.optimizer is None and self.step_factors is not None:
            whole: Any = self.model if model is None else model
            groups = parameter_groups(
                whole,
                self.step_factors,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                epsilon=self.args.adam_epsilon,
            )
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            self.optimizer = (MuonAdamW if any("muon" in group for group in groups) else kind)(groups, **options)
        return super().create_optimizer(model)

    def compute_loss(
        self, model: nn.Module, inputs: Json, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the model's loss, with the experts' auxiliary loss in training."""
        if self.experts is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        sequences = len(inputs[self.bare_model().main_input_name])
        with self.experts.watch():
            result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        extra = self.experts.loss(sequences)
        if extra is None:
            return result
        # Trainer does not divide a loss over the whole step's tokens by the number of micro-batches.
        if (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func is not None:
            extra = extra / self.current_gradient_accumulation_steps
        return (result[0] + extra, result[1]) if return_outputs else result + extra

    def training_step(self, model: nn.Module, inputs: Json, num_items_in_batch: Any = None) -> torch.Tensor:
        with one_sequence_each() if "position_ids" not in inputs else nullcontext():
            loss = super().training_step(model, inputs, num_items_in_batch)
        if (value := self.failed_loss(loss)) is not None:
            step = self.state.global_step + 1
            whole = self.processes.gathered(inputs[self.bare_model().main_input_name])
            self.layer_rows = hidden_state_rows(self.bare_model(), whole, step)
            self.guard.see_loss(step, value, self.layer_rows)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the mean loss over all held-out tokens, for any number of processes."""
        second = None if self.second is None else self._measured(self.second)["eval_loss"]
        tasks = None
        if self.measure_tasks is not None and self.processes.first:
            tasks = self.measure_tasks(self.bare_model() if self.average is None else self.average.model)
        self.evaluation = LastEvaluation(second=second, tasks=tasks)
        # With several processes, Trainer's own evaluation counts some items twice, to fill all batches.
        alone = self.processes.size == 1 and self.scores is None and self.average is None
        # Trainer averages over items, which equals an average over tokens only for items of equal length
        alone = alone and "attention_mask" not in self.eval_dataset[0]  # type: ignore[index]
        if alone or any(args) or any(kwargs.values()):
            # the data loader draws a seed, which must not change the training's random numbers
            with torch.random.fork_rng(devices=[]):
                return super().evaluate(*args, **kwargs)
        measured = self._measured(self.eval_dataset)
        scores = {name: value for name, value in measured.items() if name != "eval_loss"}
        self.evaluation = replace(self.evaluation, scores=scores)
        metrics = {"eval_loss": measured["eval_loss"], **{f"eval_{k}": v for k, v in scores.items()}}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _measured(self, held_out: Any) -> dict[str, float]:
        """Return the mean loss over all predictions, and the mean scores over all items, from all processes."""
        model: Any = self.model if self.average is None else self.average.model
        rank, size = self.processes.data_rank, self.processes.data_size
        batch = self.args.per_device_eval_batch_size * size
        totals: dict[str, float] = {"eval_loss": 0.0}
        weights = 0.0
        with evaluating(model):
            for start in range(0, len(held_out), batch):
                chunk = range(start, min(start + batch, len(held_out)))
                mine = chunk[rank::size]
                # a process without an item computes anyway, because a sharded model needs every process
                inputs = self._prepare_inputs(dict(self.collate_eval([held_out[i] for i in mine or chunk[:1]])))
                with torch.no_grad(), uncompiled(model), self.compute_loss_context_manager():
                    loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                labels = inputs["labels"]  # one label per item, or one label per token
                of_tokens = labels.ndim == 2 and not labels.is_floating_point()
                weight = 0 if not mine else int((labels != -100).sum()) if of_tokens else len(labels)
                totals["eval_loss"] += float(loss) * weight
                weights += weight
                scored = {} if self.scores is None else self.scores(outputs["logits"], labels)
                for name, values in scored.items():
                    totals[name] = totals.get(name, 0.0) + (float(values.sum()) if mine else 0.0)
        counted = {name: len(held_out) / size for name in totals} | {"eval_loss": self.processes.mean(weights)}
        return {name: self.processes.mean(total) / counted[name] for name, total in totals.items()}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Run Trainer's evaluation without compilation, because evaluations are rare and their shapes vary."""
        with uncompiled(self.bare_model()):
            return super().evaluation_loop(*args, **kwargs)
