"""Pretrain a model on text or images, from scratch or from a checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.utils.data import Subset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from lamina.core.initializers import SUITS, misfit
from lamina.core.json_types import Json
from lamina.core.values import text
from lamina.data.blocks import Blocks, ItemSource, PartShare, Splits, pair_entropy, spread
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job
from lamina.jobs.kinds import Kind
from lamina.jobs.manifest import refuse_as_output
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.status import Status
from lamina.modeling.building import recommended
from lamina.modeling.parts import drop_branches
from lamina.modeling.processes import Processes
from lamina.probes.structure.hooks import undisturbed
from lamina.training import source
from lamina.training.arguments import training_arguments
from lamina.training.checkpointing.checkpoints import RunState, Stateful
from lamina.training.checkpointing.resuming import RunIdentity, is_good
from lamina.training.checkpointing.saved_model import ModelCard
from lamina.training.checkpointing.sharding import shard
from lamina.training.execution.compiling import prepare
from lamina.training.execution.devices import peak_of
from lamina.training.execution.float8 import to_float8
from lamina.training.monitor.experts import ExpertBalance, find_routers
from lamina.training.monitor.guard import Diverged, DivergenceGuard, MakeGuard, still_falling, usual_guard
from lamina.training.monitor.scheduled_probes import ScheduledProbes
from lamina.training.monitor.writers import spike_columns
from lamina.training.optimization.optimizer import WeightAverage, schedule_of, warmup_stable_decay
from lamina.training.optimization.order import TrainOrder, order_of
from lamina.training.resolve import POLICY, ResolvedRun, initial_model, resolve_run, task_measure, training_flops
from lamina.training.run import TrainingRun, TrainingStage, train
from lamina.training.setting_groups import in_steps
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer


def pretrain(
    settings: PretrainSettings | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
    guard: MakeGuard = usual_guard,
) -> Json:
    """Train a model from scratch or from a checkpoint, as ``lamina.training.run.train`` describes."""
    return train(Pretraining(guard), settings, resume=resume, overwrite=overwrite, bar=bar)


class Pretraining(TrainingStage[PretrainSettings]):
    """The kind of run that pretrains a model on text or images."""

    kind = Kind.RUN
    record = PretrainSettings
    policy = POLICY
    resolved: ResolvedRun
    splits: Splits
    _arguments: TrainingArguments

    def __init__(self, make_guard: MakeGuard = usual_guard):
        self._make_guard = make_guard

    def given(self, settings: PretrainSettings | Mapping[str, Any]) -> PretrainSettings | Mapping[str, Any]:
        if not isinstance(settings, Mapping):
            return source.with_checkpoint(settings)
        if settings.get("from_model"):
            output = text("output", settings.get("output", PretrainSettings.output))
            refuse_as_output(output, text("from_model", settings["from_model"]))
        return settings

    def check(self, job: Job[PretrainSettings], processes: Processes) -> None:
        def resolved() -> ResolvedRun:
            settings = source.with_checkpoint(job.settings, job.given)
            if job.resumes:
                POLICY.merge(job.settings.to_dict(), settings.to_dict(), {})  # the checkpoint may have changed
            return resolve_run(settings, processes.data_size, parallel=processes.parallel)

        self.resolved = processes.by_first(resolved)
        self.settings, self.plan = self.resolved.settings, self.resolved.plan
        if processes.size > 1:  # each process must run the file that registers a user's norm
            processes.together(lambda: source.plan_of(self.settings, self.resolved.plan.num_layers))
        self.tokens_per_step = self.resolved.tokens_per_step
        self.unit = "tokens" if self.settings.packing == "on" else "real tokens"

    def read(self, processes: Processes, *, bar: bool) -> None:
        self.splits, self.processor = processes.first_per_host(lambda: self.resolved.read(bar=bar))
        self.identity = RunIdentity(self.settings, self.resolved.plan, self.splits.stats.fingerprint)

    def note(self) -> str:
        width = getattr(self.resolved.backbone, "hidden_size", None)
        said = misfit(self._init, width) if isinstance(width, int) and self.resolved.scaling is None else ""
        return f"{said} To suit any width, add --init {SUITS}" * bool(said)

    @property
    def _init(self) -> str:
        if self.settings.from_model is not None:
            return "checkpoint"
        return recommended(self.resolved.plan) if self.settings.init == "recommended" else self.settings.init

    def model(self, run: TrainingRun) -> PreTrainedModel:
        settings, processes = self.settings, run.processes
        model, run.step_factors = initial_model(self.resolved, self.splits, self.processor)
        run.average = WeightAverage(model, settings.ema_decay) if settings.ema_decay else None
        if settings.drop_path:
            drop_branches(model, settings.drop_path)
        if settings.precision == "float8":
            to_float8(model, self.resolved.device)
        replayed = settings.cuda_graphs and self.resolved.device == "cuda"
        prepare(model, compiled=settings.compile == "on", replayed=replayed, device=self.resolved.device)
        self._arguments = training_arguments(settings, processes.data_size)
        if processes.size > 1 and processes.parallel == "fsdp2":
            shard(model, processes, self.resolved.device, bf16=bool(self._arguments.bf16))
        return model

    def guard(self) -> DivergenceGuard:
        return self._make_guard(self.settings, self.splits.stats.unigram_entropy)

    def order(self, run: TrainingRun) -> TrainOrder:
        run.items = self.splits.train.for_run(self.settings.seed)
        rank, size = run.processes.data_rank, run.processes.data_size
        return order_of(self.settings, run.items, skips=run.rollbacks.skips, done=run.done, rank=rank, size=size)

    def monitor_inputs(self) -> torch.Tensor:
        return self.splits.eval.sample(self.settings.monitor_blocks or max(1, self.settings.batch_size // 4))

    def tokens(self, run: TrainingRun, steps: int) -> int:
        lengths = run.items.lengths
        return super().tokens(run, steps) if lengths is None else run.order.total(lengths, steps)

    def derived(self, loss: float) -> dict[str, float]:
        return self.resolved.objective.derived(loss, self.splits.stats)

    def realized(self, run: TrainingRun, steps: int) -> dict[str, PartShare]:
        return run.items.realized(run.order.spans(steps))

    def full_speed(self, run: TrainingRun) -> float | None:
        if (peak := peak_of(self.resolved.device)) is None:
            return None
        return run.processes.size * peak / self._flops_per_token(run)

    def _flops_per_token(self, run: TrainingRun) -> float:
        return training_flops(run.model, self.resolved.plan, self.resolved.item_tokens)

    def callbacks(self, run: TrainingRun) -> list[TrainerCallback]:
        probes = []
        if self.settings.probe_every and run.processes.first:
            probes = [
                ScheduledProbes(
                    run.folder, self.settings, self.monitor_inputs(), self.processor, run.recorder.stop_clock
                )
            ]
        return [*probes, Branches(self.settings, self.splits, run)]

    def states(self, run: TrainingRun) -> list[Stateful]:
        return [StreamPosition(run)]

    def trainer(self, run: TrainingRun) -> LaminaTrainer:
        settings, objective = self.settings, self.resolved.objective
        return LaminaTrainer(
            model=run.model,
            args=self._arguments,
            train_dataset=run.items,
            eval_dataset=self._evaluated(self.splits.eval),
            data_collator=objective.collate(settings, self.splits),
            callbacks=run.callbacks,
            guard=run.guard,
            order=run.order,
            processes=run.processes,
            experts=ExpertBalance(run.model, settings.expert_balance, settings.expert_balance_rate),
            step_factors=run.step_factors,
            schedule=schedule_of(settings),
            average=run.average,
            rate_factor=run.rollbacks.learning_rate_factor,
            collate_eval=objective.collate_eval(),
            scores=objective.scores if objective.is_scored else None,
            second=None if self.splits.second is None else self._evaluated(self.splits.second),
            measure_tasks=self._task_measure(run.processes),
            states=run.states,
            keep_also=is_good if settings.rollback else None,
        )

    def _evaluated(self, items: ItemSource) -> Subset:
        return Subset(items, spread(len(items), self.settings.eval_blocks or len(items)))

    def _task_measure(self, processes: Processes) -> Callable[[PreTrainedModel], dict[str, float]] | None:
        """Return a function that scores eval_tasks and leaves the training unchanged, or None if there are no tasks."""
        measure = task_measure(self.settings) if processes.first else None
        if measure is None:
            return None

        def scores(model: PreTrainedModel) -> dict[str, float]:
            with undisturbed(model):
                return measure.scores(model, cast(PreTrainedTokenizerBase, self.processor))

        return scores

    def verdict(self, run: TrainingRun) -> tuple[Status, str] | Diverged:
        settings, recorder, step = self.settings, run.recorder, run.trainer.state.global_step
        if not math.isfinite(loss := recorder.evaluation.loss):
            return Diverged(step, f"the eval loss is {loss}; {run.guard.describe_first_anomaly()}")
        entropy, margin = self.splits.stats.unigram_entropy, settings.stuck_margin
        guess = self.resolved.objective.guess
        if recorder.best_eval <= entropy - margin:
            return Status.FINISHED, ""
        falling = still_falling(RunFolder(run.folder).metrics, settings.steps, entropy + margin)
        if falling is not None:
            return Status.SHORT, (
                f"{settings.steps} steps are too few to tell: {falling}, and the lowest eval loss, "
                f"{recorder.best_eval:.3f}, is not {margin:g} nats below {guess} of {entropy:.3f}"
            )
        return Status.STUCK, (
            f"the eval loss never got {margin:g} nats below {guess} of {entropy:.3f} "
            f"(best: {recorder.best_eval:.3f} in {settings.steps} steps)"
        )

    def outcome(self, run: TrainingRun, status: Status, reason: str) -> Json:
        settings, recorder, stats = self.settings, run.recorder, self.splits.stats
        steps = run.trainer.state.global_step
        tokens = recorder.tokens_at(steps)
        timed = tokens - recorder.tokens_at(steps - recorder.training_steps)
        speed = timed / recorder.training_seconds if recorder.training_seconds else None
        last = recorder.evaluation
        loss = last.loss if math.isfinite(last.loss) else math.nan
        parameters = sum(p.numel() for p in run.model.parameters())
        spikes = run.processes.by_first(lambda: spike_columns(run.folder))
        result: dict[str, object] = {
            "status": str(status),
            "eval_loss": loss,
            "perplexity": None,
            "bits_per_byte": None,
            **self.resolved.objective.derived(loss, stats),
            **last.scores,
            "unigram_entropy": stats.unigram_entropy,
            "bigram_entropy": run.processes.by_first(lambda: entropy_of(self.splits, settings, run.order, steps)),
            **spikes,
            "tokens": tokens,
            "steps": steps,
            "tokens_per_second": speed,
            **({} if speed is None else recorder.utilization(speed)),
            "parameters": parameters,
            "flops": self._flops_per_token(run) * tokens,
            "init": self._init,
            **({} if settings.from_model is None else {"from": settings.from_model}),
            **({"mix": mix} if (mix := recorder.realized(steps)) else {}),
            "reason": reason,
        }
        if self.splits.second is not None:
            result["eval_corpus_loss"] = last.second
        if settings.eval_tasks is not None:
            result["tasks"] = last.tasks
        rows = [row for callback in run.callbacks if isinstance(callback, Branches) for row in callback.rows]
        branches = {"branches": rows} if rows else {}
        return {
            **columns.checked(result),
            "rollbacks": run.rollbacks.to_list(),
            **branches,
            **run.guard.outcome(status),
        }

    def trained(self, run: TrainingRun, result: Json) -> tuple[PreTrainedModel, ModelCard]:
        objective, settings = self.resolved.objective, self.settings
        card = ModelCard(
            head=objective.head,
            data=objective.facts(settings, self.splits.stats),
            result=result,
            command=settings.command(),
            base_model=settings.from_model,
        )
        return run.model if run.average is None else run.average.model, card


MOST_TOKENS = 2**24
"""The maximum number of tokens that Lamina counts for a bigram table, from the beginning of the training."""


def entropy_of(splits: Splits, settings: PretrainSettings, order: TrainOrder, steps: int) -> float | None:
    """Return the held-out loss in nats of a bigram table, which counts all token pairs that the run has read.

    If the model's loss is higher, the model may make no use of its layers. Repeated text counts once. A streamed corpus
    counts only the sample for the unigram entropy. Return None before the first step, or without next-token prediction.
    """
    if not isinstance(splits, Blocks) or steps < 1:
        return None
    batch = order.batch_size * order.gradient_accumulation
    steps = min(steps, max(1, MOST_TOKENS // (batch * splits.stats.sequence_length)))
    micro_batches = (order.micro_batch(s, m) for s in range(1, steps + 1) for m in range(order.gradient_accumulation))
    train = splits.train.for_run(settings.seed).rows([index for batch in micro_batches for index in batch])
    held_out = splits.eval.rows(spread(len(splits.eval), settings.eval_blocks or len(splits.eval)))
    return pair_entropy(train, held_out, splits.stats.vocab_size)


class StreamPosition:
    """The position in a streamed corpus, which checkpoints store so that a run can resume."""

    def __init__(self, run: TrainingRun):
        self.run = run

    def state_dict(self) -> Json:
        """Return the position of the next unread text block, or {} without streaming."""
        following = self.run.order.start(self.run.trainer.state.global_step + 1)
        position = self.run.items.state_dict(following)
        return {} if position is None else {"stream": position}

    def load_state_dict(self, state: RunState) -> None:
        """Continue reading at the checkpoint's position, or at the beginning if the checkpoint has no position."""
        self.run.items.load_state_dict(state.get("stream"), verbose=self.run.processes.first)


class Branches(TrainerCallback):
    """Train decay branches: shorter runs that share the main run's steps until their decay begins.

    Under the wsd schedule, runs of different lengths are equal until the shorter run's learning rate decays. A branch
    therefore starts from the main run's state, and decays to its own end. The main run then continues undisturbed
    (Hägele et al., arXiv 2405.18392, Section 4). Lamina writes the branches' losses to metrics.jsonl.

    Args:
        run: the main run.

    Attributes:
        rows: one record per finished branch, with branch_steps, tokens, branch_loss, and branch_bigram_entropy (a
            bigram table's loss on the branch's text).
        trainer: the main run's Trainer. Set this attribute before training.

    Raises:
        UserError: the run has several processes, or the model has experts.
    """

    def __init__(self, settings: PretrainSettings, splits: Splits, run: TrainingRun):
        self.settings, self.splits, self.run = settings, splits, run
        self.rows: list[Json] = []
        self.trainer: Any = None
        if settings.branches is None:
            return
        if run.processes.size > 1:
            raise UserError(
                f"branches: {settings.branches!r} does not work in {run.processes.size} processes. Run one process."
            )
        if find_routers(run.model):
            raise UserError(f"branches: {settings.branches!r} does not work with experts. Choose a dense backbone.")

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        settings = self.settings
        for steps in settings.branch_steps():
            ended = any(row["branch_steps"] == steps for row in self.rows)
            if state.global_step == steps - in_steps(settings.decay, steps) and not ended:
                recorder = self.run.recorder
                row = {"branch_steps": steps, "tokens": recorder.tokens_at(steps), **self._train(steps)}
                self.rows.append(row)
                recorder.write({"step": state.global_step, **row})

    def _train(self, steps: int) -> Json:
        """Train and evaluate the branch of ``steps`` steps (a shorter run), then restore the main run's state."""
        trainer = self.trainer
        self.run.recorder.stop_clock()
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
        table = entropy_of(self.splits, self.settings, self.run.order, steps)
        return {"branch_loss": float(loss), "branch_bigram_entropy": table}

    def _decay(self, steps: int) -> None:
        """Take a branch's steps, from the main run's next step to the branch's last step."""
        settings, trainer = self.settings, self.trainer
        model, optimizer = trainer.model, trainer.optimizer
        decay, begun = in_steps(settings.decay, steps), trainer.state.global_step
        order = order_of(settings, self.run.items, done=begun)
        order.steps = steps
        batches = (trainer.data_collator([self.run.items[index] for index in batch]) for batch in order)
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
                # LaminaTrainer's method would add the branch to the records
                Trainer.training_step(trainer, model, inputs, predicted)
            if settings.max_grad_norm:
                trainer.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> Json:
        return {"branches": self.rows}

    def load_state_dict(self, state: RunState) -> None:
        self.rows = list(state.get("branches", []))
