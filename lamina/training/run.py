"""One training run: a model, its trainer, its records, and the states that are resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from lamina.core.json_types import Json
from lamina.data.blocks import ItemSource, PartShare, Splits, spread
from lamina.modeling.parts import drop_branches
from lamina.training.arguments import training_arguments
from lamina.training.checkpointing.checkpoints import RunState, Stateful, run_state, step_of
from lamina.training.checkpointing.resuming import Rollbacks, RunIdentity, checkpoint_to_resume, is_good
from lamina.training.checkpointing.sharding import shard
from lamina.training.checks import task_measure
from lamina.training.execution.compiling import prepare
from lamina.training.execution.processes import Processes
from lamina.training.initial import initial_model
from lamina.training.monitor.experts import ExpertBalance
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.parameter_measures import UpdateRatios
from lamina.training.monitor.recorder import RunRecorder, stop_signals
from lamina.training.monitor.scheduled_probes import ScheduledProbes, undisturbed
from lamina.training.monitor.trackers import Trackers, tensorboard
from lamina.training.monitor.writers import LayersWriter, MetricsWriter, NoWriter
from lamina.training.objectives.objective import Processor
from lamina.training.optimization.averaging import WeightAverage
from lamina.training.optimization.order import TrainOrder, order_of
from lamina.training.optimization.schedule import schedule_of
from lamina.training.resolve import ResolvedRun
from lamina.training.trainer import LaminaTrainer
from lamina.training.trainers.branches import Branches

logger = logging.getLogger(__name__)


class TrainingRun:
    """A resolved run in this process, new or resumed from a checkpoint.

    Args:
        resolved: the run.
        splits: its data.
        processor: of the data: a tokenizer or an image processor.
        processes: this process and the run's others.
        rollbacks: the run's so far.
        guard: decides whether the run has diverged.
        resume: whether to resume from the newest good checkpoint.
        bar: whether to show progress.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        splits: Splits,
        processor: Processor,
        processes: Processes,
        rollbacks: Rollbacks,
        *,
        guard: DivergenceGuard,
        resume: bool,
        bar: bool,
    ):
        self.resolved, self.splits, self.processor, self.processes = resolved, splits, processor, processes
        self.rollbacks, self.bar, self.folder = rollbacks, bar, Path(resolved.settings.output)
        self.model, self._rate_factors = initial_model(resolved, splits, processor)
        self.average = WeightAverage(self.model, resolved.settings.ema_decay) if resolved.settings.ema_decay else None
        if resolved.settings.drop_path:
            drop_branches(self.model, resolved.settings.drop_path)
        self.settings = settings = resolved.settings
        prepare(self.model, compiled=settings.compile == "on")
        self._arguments = training_arguments(settings, processes.size)
        if processes.size > 1 and processes.parallel == "fsdp2":
            shard(self.model, processes, resolved.device, bf16=bool(self._arguments.bf16))
        self.checkpoint, state = self._find_checkpoint() if resume else (None, {})
        self.guard = guard
        self.train_items = splits.train.for_run(settings.seed)
        self.order = self._make_order(done=max(0, state.get("step", 0)))
        self.updates = UpdateRatios(self.model)
        self.trackers = Trackers(settings.report_to, self.folder) if processes.first else None
        self.recorder = self._make_recorder()
        self._probing = self._make_probing()
        self.branches = Branches(
            settings,
            self.model,
            splits=splits,
            items=self.train_items,
            order=self.order,
            recorder=self.recorder,
            processes=processes,
        )
        self.states: list[Stateful] = [
            self.recorder,  # first: it syncs to disk what the others refer to
            rollbacks,
            RunIdentity(settings, resolved.plan, splits.stats.fingerprint),
            StreamPosition(self),
            *self._probing,
            self.branches,
        ]
        self.trainer = self._make_trainer()
        self.trainer.load_state_dict(state)

    def _find_checkpoint(self) -> tuple[Path | None, RunState]:
        """The checkpoint to resume from and its run state; if there is none, step -1: the run begins again."""
        folder = self.folder / "checkpoints"
        checkpoint = self.processes.by_first(lambda: checkpoint_to_resume(folder, self.rollbacks))
        return checkpoint, run_state(checkpoint) if checkpoint else {"step": -1}

    def _make_order(self, done: int) -> TrainOrder:
        rank, size = self.processes.rank, self.processes.size
        return order_of(self.settings, self.train_items, skips=self.rollbacks.skips, done=done, rank=rank, size=size)

    def _make_recorder(self) -> RunRecorder:
        tokens, first = self.resolved.tokens_per_step, self.processes.first
        records = [{"rollback": r.number, "tokens": r.step * tokens, **asdict(r)} for r in self.rollbacks.done]
        return RunRecorder(
            metrics=MetricsWriter(self.folder, records) if first else NoWriter(),
            layers=LayersWriter(self.folder) if first else NoWriter(),
            guard=self.guard,
            monitor_inputs=self._monitor_inputs(),
            tokens_per_step=tokens,
            derived=lambda loss: self.resolved.objective.derived(loss, self.splits.stats),
            trackers=self.trackers,
            bar=self.bar,
            processes=self.processes,
            realized=self.realized,
            updates=self.updates,
            pause_step=self.settings.pause_step,
        )

    def _make_probing(self) -> list[ScheduledProbes]:
        if not (self.settings.probe_every and self.processes.first):
            return []
        return [ScheduledProbes(self.folder, self.settings, self._monitor_inputs(), self.processor)]

    def _make_trainer(self) -> LaminaTrainer:
        settings, held_out = self.settings, self.splits.eval
        objective = self.resolved.objective
        trainer = LaminaTrainer(
            model=self.model,
            args=self._arguments,
            train_dataset=self.train_items,
            eval_dataset=self._evaluated(held_out),
            data_collator=objective.collate(settings, self.splits),
            callbacks=[self.updates, self.recorder, *tensorboard(self.trackers), *self._probing, self.branches],
            guard=self.guard,
            order=self.order,
            processes=self.processes,
            experts=ExpertBalance(self.model, settings.expert_balance, settings.expert_balance_rate),
            rate_factors=self._rate_factors,
            schedule=schedule_of(settings),
            average=self.average,
            rate_factor=self.rollbacks.learning_rate_factor,
            collate_eval=objective.collate_eval(),
            scores=objective.scores if objective.is_scored else None,
            second=None if self.splits.second is None else self._evaluated(self.splits.second),
            measure_tasks=self._task_measure(),
            states=self.states,
            keep_also=is_good if settings.rollback else None,
        )
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        for callback in (self.recorder, *self._probing, self.branches):
            callback.trainer = trainer
        return trainer

    def _evaluated(self, items: ItemSource) -> Subset:
        """The items that are evaluated on, spread evenly."""
        return Subset(items, spread(len(items), self.settings.eval_blocks or len(items)))

    def _task_measure(self) -> Callable[[PreTrainedModel], dict[str, float]] | None:
        """What scores the model on eval_tasks without any effect on the training."""
        measure = task_measure(self.settings) if self.processes.first else None
        if measure is None:
            return None

        def scores(model: PreTrainedModel) -> dict[str, float]:
            with undisturbed(model):
                return measure.scores(model, cast(PreTrainedTokenizerBase, self.processor))

        return scores

    def _monitor_inputs(self) -> torch.Tensor:
        """The model's main input for the layer monitor and the scheduled probes, of held-out items: [items, ...]."""
        return self.splits.eval.sample(self.settings.monitor_blocks or max(1, self.settings.batch_size // 4))

    def train(self) -> bool | Diverged:
        """Train; returns whether all steps are done, or the guard's Diverged; the same in every process."""
        trainer, recorder = self.trainer, self.recorder
        complete = False
        self._warn_of_repetition()
        with stop_signals(recorder):
            try:
                if self.checkpoint is not None and step_of(self.checkpoint) >= self.settings.steps:
                    trainer._load_from_checkpoint(str(self.checkpoint))  # Trainer would take another step
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                else:
                    trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
                step = trainer.state.global_step
                complete = step >= self.settings.steps
                if complete and self.processes.by_first(lambda: recorder.evaluation.step != step):
                    trainer.evaluate()
            except Diverged as diverged:
                recorder.record_divergence(diverged)
                return diverged
            finally:
                recorder.close()
        return complete

    def _warn_of_repetition(self) -> None:
        """Warn of corpora of a mix that the run sees more than once."""
        if not self.processes.first or self.checkpoint is not None:
            return
        for name, part in self.realized(self.settings.steps).items():
            if (epochs := part.get("epochs", 0.0)) > 1:
                logger.warning("corpus %s: its blocks are seen %.2f times in this run", name, epochs)

    def realized(self, steps: int) -> dict[str, PartShare]:
        """What each corpus of a mix contributes in the first ``steps`` steps; empty for a single corpus."""
        return self.train_items.realized(self.order.spans(steps))


class StreamPosition:
    """The position at which a streamed corpus resumes."""

    def __init__(self, run: TrainingRun):
        self.run = run

    def state_dict(self) -> Json:
        """The position of the first block after the checkpoint's step."""
        following = self.run.order.start(self.run.trainer.state.global_step + 1)
        place = self.run.train_items.state_dict(following)
        return {} if place is None else {"stream": place}

    def load_state_dict(self, state: RunState) -> None:
        """Start reading at that position; at the corpus's beginning if the state has none."""
        self.run.train_items.load_state_dict(state.get("stream"), verbose=self.run.processes.first)
