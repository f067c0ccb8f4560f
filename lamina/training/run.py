"""One line of training: a model, its trainer and its records."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from tqdm.auto import tqdm
from transformers import TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from lamina.data import Blocks
from lamina.data import bits_per_byte as bits_per_byte_of
from lamina.data.blocks import spread
from lamina.jobs import digests
from lamina.jobs.files import write_json, write_yaml
from lamina.jobs.status import Status
from lamina.modeling.building import build
from lamina.training import source
from lamina.training.arguments import device_of, training_arguments
from lamina.training.checkpointing.resuming import go_on_from, identity
from lamina.training.checkpointing.rollback import Rollbacks
from lamina.training.checkpointing.sharding import shard
from lamina.training.checkpointing.store import run_state, step_of
from lamina.training.execution import speed
from lamina.training.execution.processes import Processes
from lamina.training.monitoring.experts import ExpertBalance
from lamina.training.monitoring.falling import deciding, merged, read_metrics, still_falling
from lamina.training.monitoring.guard import Diverged, DivergenceGuard
from lamina.training.monitoring.recorder import RunRecorder, stop_signals
from lamina.training.monitoring.scheduled_probes import ScheduledProbes
from lamina.training.monitoring.writers import LayersWriter, MetricsWriter, NoWriter
from lamina.training.optimizer import rate_factors, width_scaling_of
from lamina.training.order import TrainOrder
from lamina.training.resolve import backbone_config
from lamina.training.schedule import schedule_of
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

logger = logging.getLogger(__name__)


class Line:
    """One line of training: a model, its trainer and its records, new or from a checkpoint."""

    def __init__(
        self,
        settings: PretrainSettings,
        blocks: Blocks,
        tokenizer: Any,
        crew: Processes,
        rollbacks: Rollbacks,
        *,
        resume: bool,
        bar: bool,
    ):
        self.settings, self.blocks, self.crew = settings, blocks, crew
        target = Path(settings.output)
        config = backbone_config(settings, vocab_size=len(tokenizer))
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.plan = source.plan_of(settings, config.num_hidden_layers)
        torch.manual_seed(settings.seed)
        profile = blocks.train.sample(settings.batch_size)
        scaling = width_scaling_of(settings)
        if settings.from_model is None:
            self.model = build(
                config, self.plan, head="causal_lm", init=settings.init, profile_ids=profile, width_scaling=scaling
            )
        else:
            self.model = source.load(settings.from_model, config.max_position_embeddings)
        factors = None if scaling is None else rate_factors(self.model, scaling)
        settings = self.settings = _settle(settings, self.model, torch.device(device_of(settings)), crew, bar=bar)
        arguments = training_arguments(settings, crew.size)
        if crew.size > 1 and crew.parallel == "fsdp2":
            shard(self.model, crew, device_of(settings), bf16=bool(arguments.bf16))
        folder = target / "checkpoints"
        self.checkpoint = crew.by_first(lambda: go_on_from(folder, rollbacks)) if resume else None
        state = run_state(self.checkpoint) if self.checkpoint else None
        resumed_step = (state["step"] if state else -1) if resume else None
        self.guard = DivergenceGuard(margin=settings.divergence_margin, patience=settings.divergence_patience)
        if state:
            self.guard.restore(state["guard"])
        monitor_blocks = settings.monitor_blocks or max(1, settings.batch_size // 4)
        monitor_ids = blocks.eval.sample(monitor_blocks)
        tokens_per_step = settings.batch_size * settings.gradient_accumulation * settings.sequence_length
        returns = [{"rollback": r.number, "tokens": r.step * tokens_per_step, **asdict(r)} for r in rollbacks.done]
        first, logged = crew.first, int(state["logged_step"]) if state else 0
        files, records = (state.get("files"), state.get("records")) if state else (None, None)
        train = blocks.train.for_run(settings.seed)
        order = TrainOrder(
            len(train),
            steps=settings.steps,
            batch_size=settings.batch_size,
            gradient_accumulation=settings.gradient_accumulation,
            seed=settings.seed,
            jumps=rollbacks.jumps,
            done=state["step"] if state else 0,
            rank=crew.rank,
            size=crew.size,
            shuffled=not train.in_order,
        )
        train.load_state_dict(state.get("stream") if state else None, verbose=first)
        if first and not state:
            for name, part in train.realized(order.spans(settings.steps)).items():
                if (epochs := part.get("epochs", 0.0)) > 1:
                    logger.warning("corpus %s: its blocks are seen %.2f times in this run", name, epochs)
        self.recorder = RunRecorder(
            metrics=MetricsWriter(target, resumed_step, returns, logged, records) if first else NoWriter(),
            layers=LayersWriter(target, resumed_step, files) if first else NoWriter(),
            guard=self.guard,
            monitor_ids=monitor_ids,
            tokens_per_step=tokens_per_step,
            bits_per_byte=lambda loss: bits_per_byte_of(loss, blocks.stats),
            track_layers=bool(settings.reports()),
            bar=bar,
            processes=crew,
            realized=lambda step: train.realized(order.spans(step)),
        )
        if state and "evaluations" in state:
            self.recorder.take_up(state["evaluations"])
        self._recorded = state.get("recorded_losses", []) if state else []
        probing = None
        if settings.probe_every and first:
            probing = ScheduledProbes(target, settings, monitor_ids, tokenizer, resumed_step, files)

        def on_checkpoint() -> dict[str, Any]:
            self.recorder.before_checkpoint()
            stream = train.state_dict(order.start(self.trainer.state.global_step + 1))
            return {
                "rollbacks": len(rollbacks.done),
                "evaluations": self.recorder.evaluations(),
                **({"recorded_losses": deciding(self._seen(), settings.steps)} if first else {}),
                "returns": rollbacks.to_list(),
                "records": self.recorder.metrics.known(),
                "files": digests.entries(target),
                **({} if stream is None else {"stream": stream}),
                **identity(settings, self.plan, blocks.stats.fingerprint),
            }

        self.trainer = LaminaTrainer(
            model=self.model,
            args=arguments,
            train_dataset=train,
            eval_dataset=Subset(blocks.eval, spread(len(blocks.eval), settings.eval_blocks or len(blocks.eval))),
            callbacks=[self.recorder, *(_tensorboard(settings) if first else []), *([probing] if probing else [])],
            guard=self.guard,
            order=order,
            processes=crew,
            experts=ExpertBalance(self.model, settings.expert_balance, settings.expert_balance_rate),
            rate_factors=factors,
            schedule=schedule_of(settings),
            rate_factor=rollbacks.learning_rate_factor,
            run_state=state,
            on_checkpoint=on_checkpoint,
            spared=is_good if settings.rollback else None,
        )
        for callback in (ProgressCallback, PrinterCallback):
            self.trainer.remove_callback(callback)
        self.recorder.trainer = self.trainer
        if probing:
            probing.trainer = self.trainer

    def train(self) -> tuple[Status, str] | Diverged:
        """Train to the end; gives how it ended, the same in every process."""
        settings, trainer, recorder = self.settings, self.trainer, self.recorder
        path = str(self.checkpoint) if self.checkpoint else None
        complete = False
        with stop_signals(recorder):
            try:
                if self.checkpoint is not None and step_of(self.checkpoint) >= settings.steps:
                    trainer._load_from_checkpoint(str(path))  # Trainer would take one step too many
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                else:
                    trainer.train(resume_from_checkpoint=path)
                step = trainer.state.global_step
                complete = step >= settings.steps
                if complete and self.crew.by_first(lambda: recorder.evaluated_step != step):
                    trainer.evaluate()
            except Diverged as diverged:
                recorder.record_divergence(diverged)
                return diverged
            finally:
                recorder.close()
        return self.crew.by_first(lambda: self._verdict(complete))

    def _seen(self) -> list[dict[str, Any]]:
        """The run's records, and of those that were lost what its checkpoint has kept."""
        return merged(self._recorded, read_metrics(Path(self.settings.output)))

    def _verdict(self, complete: bool) -> tuple[Status, str] | Diverged:
        settings, recorder, step = self.settings, self.recorder, self.trainer.state.global_step
        if recorder.interrupted and not complete:
            return Status.INTERRUPTED, f"{recorder.interrupted} at step {step}"
        if not math.isfinite(recorder.last_eval):
            return Diverged(step, f"the eval loss is {recorder.last_eval}; {self.guard.first_to_leave()}")
        entropy = self.blocks.stats.unigram_entropy
        if recorder.best_eval > entropy - settings.stuck_margin:
            falling = still_falling(self._seen(), settings.steps, entropy + settings.stuck_margin)
            if falling is not None:
                return Status.SHORT, (
                    f"{settings.steps} steps are too few to tell: {falling}, and its best of {recorder.best_eval:.3f} "
                    f"is not {settings.stuck_margin:g} nats below the corpus' unigram entropy of {entropy:.3f} yet"
                )
            return Status.STUCK, (
                f"the eval loss never got {settings.stuck_margin:g} nats below the corpus' unigram entropy of "
                f"{entropy:.3f} (best: {recorder.best_eval:.3f} in {settings.steps} steps)"
            )
        return Status.FINISHED, ""


def is_good(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's run state is of a time when the loss was not on its way up."""
    return state["guard"]["above_since"] is None


def _settle(
    settings: PretrainSettings, model: torch.nn.Module, device: torch.device, crew: Processes, *, bar: bool
) -> PretrainSettings:
    """The settings with their precision and compilation decided, and kept so: a resumed run does not try again."""
    target = Path(settings.output)

    def decide() -> PretrainSettings:
        choice = speed.choose(settings, lambda: model, device)
        decided = replace(settings, precision=choice.precision, compile=choice.compile)
        write_json(target / "speed.json", choice.to_dict())
        write_yaml(target / "config.yaml", decided.to_dict())
        logger.info("%s", choice)
        if bar:
            tqdm.write(str(choice), file=sys.stderr)
        return decided

    if speed.is_open(settings):
        settings = crew.by_first(decide)
    speed.prepare(model, settings)
    return settings


def _tensorboard(settings: PretrainSettings) -> list[Any]:
    if "tensorboard" not in settings.reports():
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(Path(settings.output) / "tensorboard")))]
