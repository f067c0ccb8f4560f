"""One run after pretraining: a model, TRL's trainer, the records, and the states that are resumed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from lamina.core.json_types import Json
from lamina.jobs.status import Status
from lamina.posttraining.best import BestWeights
from lamina.posttraining.identity import TuningIdentity
from lamina.posttraining.recorder import TuningRecorder
from lamina.posttraining.settings import TuningSettings
from lamina.posttraining.stage import Examples, Setup, Stage
from lamina.posttraining.starting import Start, add_lora
from lamina.posttraining.trainer import Parts, Passed
from lamina.training.checkpointing.checkpoints import RunState, run_state, step_of
from lamina.training.checkpointing.resuming import Rollbacks, checkpoint_to_resume
from lamina.training.execution.processes import Processes
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.parameter_measures import UpdateRatios
from lamina.training.monitor.recorder import stop_signals
from lamina.training.monitor.trackers import Trackers, tensorboard
from lamina.training.monitor.writers import LayersWriter, MetricsWriter, NoWriter
from lamina.training.optimization.order import TrainOrder
from lamina.training.optimization.schedule import schedule_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that is ready to be run.

    Attributes:
        stage: which of the jobs.
        settings: complete, with the number of steps.
        start: the model that it starts from.
        examples: its data.
        identity: what a resumed run is compared with.
    """

    stage: Stage[Passed]
    settings: TuningSettings
    start: Start
    examples: Examples
    identity: TuningIdentity


class TuningRun:
    """A job in this process, new or resumed from a checkpoint."""

    def __init__(self, job: Job, processes: Processes, *, resume: bool, bar: bool):
        self.job, self.processes = job, processes
        self.settings, self.start, self.examples = job.settings, job.start, job.examples
        self.folder = Path(str(job.settings.output))
        self.model = job.stage.model(job.settings, job.start)
        self.tuner = add_lora(self.model, job.settings)
        if self.tuner is not None and job.settings.gradient_checkpointing:
            self.model.enable_input_require_grads()  # else a checkpointed block of frozen weights has no gradient
        self.checkpoint, state = self._find_checkpoint() if resume else (None, {})
        margin = job.settings.divergence_margin if job.stage.guarded else math.inf
        self.guard = DivergenceGuard(margin=margin, patience=job.settings.divergence_patience)
        self.updates = UpdateRatios(self.model)
        self.trackers = Trackers(job.settings.report_to, self.folder) if processes.first else None
        self.recorder = self._make_recorder(bar and processes.first)
        self.best = BestWeights(self.folder, self.model, processes, resumed=int(state.get("step", 0)))
        parts = Parts(
            processes=processes,
            guard=self.guard,
            order=self._make_order(max(0, int(state.get("step", 0)))),
            schedule=schedule_of(job.settings.as_run()),
            states=[self.recorder, Rollbacks(folder=self.folder), job.identity],
        )
        self.setup = Setup(
            settings=job.settings,
            start=job.start,
            examples=job.examples,
            model=self.model,
            callbacks=self._callbacks(),
            processes=processes,
        )
        self.trainer = job.stage.trainer(self.setup, parts)
        for callback in (ProgressCallback, PrinterCallback):
            self.trainer.remove_callback(callback)
        self.recorder.trainer = self.trainer
        self.trainer.load_state_dict(state)

    def _callbacks(self) -> list[TrainerCallback]:
        keeps_best = getattr(self.settings, "best_by", "last") != "last"
        kept = [self.best] if keeps_best else []
        return [self.updates, self.recorder, *tensorboard(self.trackers), *kept]

    def _find_checkpoint(self) -> tuple[Path | None, RunState]:
        none = Rollbacks(folder=self.folder)
        found = self.processes.by_first(lambda: checkpoint_to_resume(self.folder / "checkpoints", none))
        return found, run_state(found) if found else {"step": -1}

    def _make_recorder(self, bar: bool) -> TuningRecorder:
        first = self.processes.first
        return TuningRecorder(
            metrics=MetricsWriter(self.folder) if first else NoWriter(),
            layers=LayersWriter(self.folder) if first else NoWriter(),
            guard=self.guard,
            monitor_inputs=self.examples.monitored,
            tokens_per_step=0,
            derived=lambda loss: {},
            trackers=self.trackers,
            bar=bar,
            processes=self.processes,
            updates=self.updates,
            pause_step=self.settings.pause_step,
        )

    def _make_order(self, done: int) -> TrainOrder:
        settings = self.settings
        return self.job.stage.order(
            settings,
            len(self.examples.train),
            steps=settings.steps,
            batch_size=settings.batch_size,
            gradient_accumulation=settings.gradient_accumulation,
            seed=settings.seed,
            done=done,
            rank=self.processes.rank,
            size=self.processes.size,
        )

    def train(self) -> tuple[Status, str]:
        """Train; returns how the run ended, and why; the same in every process."""
        trainer, recorder, steps = self.trainer, self.recorder, self.settings.steps
        with stop_signals(recorder):
            try:
                if self.checkpoint is not None and step_of(self.checkpoint) >= steps:
                    trainer._load_from_checkpoint(str(self.checkpoint))  # Trainer would take another step
                    trainer._move_model_to_device(trainer.bare_model(), trainer.args.device)
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                else:
                    if trainer.args.do_eval and self.checkpoint is None:
                        trainer.evaluate()
                    trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
                step = trainer.state.global_step
                if step >= steps and self.processes.by_first(
                    lambda: recorder.evaluation.step != step or not recorder.last_measured
                ):
                    trainer.evaluate()
            except Diverged as diverged:
                recorder.record_divergence(diverged)
                return Status.DIVERGED, diverged.reason
            finally:
                recorder.close()
        if recorder.interrupted and step < steps:
            return Status.INTERRUPTED, f"{recorder.interrupted} at step {step}"
        measure = self.job.stage.measure
        value = self.processes.by_first(lambda: float(str(recorder.last_measured.get(measure, math.nan))))
        if not math.isfinite(value):
            return Status.DIVERGED, f"{measure} is not finite at step {step}"
        return Status.FINISHED, ""

    def outcome(self, status: Status, reason: str) -> Json:
        """The numbers of result.json, apart from the job's own."""
        recorder, parameters = self.recorder, list(self.model.parameters())
        timed = recorder.training_seconds
        return {
            "status": str(status),
            **recorder.last_measured,
            "steps": self.trainer.state.global_step,
            "tokens": self.trainer.tokens_seen,
            "tokens_per_second": recorder.tokens_here / timed if timed else None,
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "from": self.settings.from_model,
            **self.examples.notes,
            "reason": reason,
            **self.guard.outcome(status),
        }
