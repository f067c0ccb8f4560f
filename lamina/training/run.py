"""Train one run: read its settings, and write a folder with records, checkpoints, a result and a model.

Each kind of run (a "stage", such as pretraining or fine-tuning) supplies the model, the data and the Trainer. This
module trains the model, and writes the folder.
"""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
import transformers
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback

from lamina.core.json_types import Json
from lamina.core.terminal import show_line
from lamina.data.blocks import ItemSource, PartShare
from lamina.errors import UserError, mark_reported
from lamina.jobs.files import disk_full, full_disk
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job, ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.manifest import MODEL
from lamina.jobs.names import PLAN, RESULT
from lamina.jobs.seals import write_result
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED, Status
from lamina.modeling.processes import GONE, Processes, join_processes, lost_another, reported_once
from lamina.modeling.scaling import StepFactors
from lamina.placements import Plan
from lamina.training.checkpointing.checkpoints import Background, Checkpoints, Stateful, run_state, step_of
from lamina.training.checkpointing.resuming import (
    DATA,
    Rollbacks,
    checkpoint_to_resume,
    is_good,
    result_to_keep,
    stored_settings,
)
from lamina.training.checkpointing.saved_model import ModelCard, push, save_model
from lamina.training.monitor.followed import Followed
from lamina.training.monitor.gain_measures import lamina_gains
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.monitor import Writers
from lamina.training.monitor.parameter_measures import GradientNorms, UpdateRatios, found_parameters
from lamina.training.monitor.recorder import RunRecorder, lamina_rows, stop_signals
from lamina.training.monitor.trackers import tensorboard
from lamina.training.monitor.writers import keep_abandoned
from lamina.training.objectives.objective import Processor
from lamina.training.optimization.optimizer import WeightAverage
from lamina.training.optimization.order import TrainOrder

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Settings)
Options: TypeAlias = Any
"""The settings of any kind of training run."""


class Identity(Stateful, Protocol):
    """The content that identifies a run, such as its data. Checkpoints store this content to check a resumed run."""

    @property
    def text(self) -> Mapping[str, str]:
        """The content of data.json."""
        ...

    def refuse_changes(self, folder: Path) -> None:
        """Raise UserError if the content has changed since the run in the folder began."""
        ...


class TrainingStage(ABC, Generic[S]):
    """A kind of training run, such as pretraining."""

    kind: ClassVar[Kind]  # the kind of the run's folder
    record: type[S]
    policy: ClassVar[ResumePolicy]  # the settings that may change when a run resumes
    recorder: ClassVar[type[RunRecorder]] = RunRecorder
    evaluates_first: ClassVar[bool] = False  # whether Lamina evaluates a new run before its first step
    tokens_per_step: int = 0  # the number of tokens in an optimizer step, or 0 if Lamina counts tokens during the run
    unit: str = "tokens"  # the word for tokens in progress lines
    settings: S  # the complete settings. ``check`` and ``read`` set this attribute and the attributes below
    plan: Plan | None  # the placement of the norms, or None for a model that keeps its transformers class
    processor: Processor  # the tokenizer or image processor to save with the model
    identity: Identity  # the content that a resumed run must match

    def given(self, settings: S | Mapping[str, Any]) -> S | Mapping[str, Any]:
        """Adjust the user's settings before Lamina opens the run's folder."""
        return settings

    @abstractmethod
    def check(self, job: Job[S], processes: Processes) -> None:
        """Complete and check the settings before Lamina reads any data. Raises UserError if a setting is invalid."""

    @abstractmethod
    def read(self, processes: Processes, *, bar: bool) -> None:
        """Read all data before Lamina changes the run's folder. Raises UserError if the data are unusable."""

    def note(self) -> str:
        """Return a warning for the user before the first step, or ""."""
        return ""

    @abstractmethod
    def model(self, run: TrainingRun) -> PreTrainedModel: ...

    @abstractmethod
    def guard(self) -> DivergenceGuard:
        """Build the guard that decides whether the run has diverged."""

    @abstractmethod
    def order(self, run: TrainingRun) -> TrainOrder: ...

    @abstractmethod
    def monitor_inputs(self) -> torch.Tensor:
        """Return held-out inputs for the layer monitor: [items, ...]."""

    @abstractmethod
    def trainer(self, run: TrainingRun) -> Any: ...

    def callbacks(self, run: TrainingRun) -> list[TrainerCallback]:
        """Return the callbacks. Lamina sets each callback's ``trainer``, and restores its state in a resumed run."""
        return []

    def states(self, run: TrainingRun) -> list[Stateful]:
        """Return the stage's objects with a state that checkpoints store."""
        return []

    def tokens(self, run: TrainingRun, steps: int) -> int:
        """Return how many tokens, without padding, the run has trained on after ``steps`` steps."""
        return steps * self.tokens_per_step

    def derived(self, loss: float) -> dict[str, float]:
        """Return the metrics that follow from an evaluation's loss, such as the perplexity."""
        return {}

    def realized(self, run: TrainingRun, steps: int) -> dict[str, PartShare]:
        """Return the part of each corpus in the training data so far, or {} for a single corpus."""
        return {}

    def full_speed(self, run: TrainingRun) -> float | None:
        """Return the tokens per second at the GPUs' peak speed, or None if the speed is unknown."""
        return None

    @abstractmethod
    def verdict(self, run: TrainingRun) -> tuple[Status, str] | Diverged:
        """Return the status of an uninterrupted run, and the reason. Only the first process calls this."""

    @abstractmethod
    def outcome(self, run: TrainingRun, status: Status, reason: str) -> Json:
        """Return the values for result.json."""

    @abstractmethod
    def trained(self, run: TrainingRun, result: Json) -> tuple[PreTrainedModel, ModelCard]:
        """Return the model to save and its card. The method may add entries to the result."""

    def saved(self) -> None:
        """Clean up after the model is saved. Only the first process calls this."""


GRACE_SECONDS = 30.0  # a killed study's worker may still write its checkpoint


def train(
    stage: TrainingStage[S],
    settings: S | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Json:
    """Train a run, write its folder, and return the content of result.json.

    If a run diverges, gets stuck or is interrupted, the result's status says so, and the function raises no exception.
    With ``resume``, a finished run stays unchanged, and any other run continues from its newest intact checkpoint. With
    torchrun or accelerate launch, every process calls this function with the same settings and gets the same result.

    Args:
        settings: all settings, or a mapping of the settings to change.

    Raises:
        UserError: a setting is invalid, the corpus or the model is unreadable, the output folder has files, or the
            settings or data differ from the run to resume.
        OSError: the disk is full.
    """
    policy = stage.policy
    job = reported_once(
        lambda: open_job(
            stage.kind,
            stage.record,
            stage.given(settings),
            resume=resume,
            overwrite=overwrite,
            policy=policy,
            stored=lambda folder: stored_settings(folder, policy.free | policy.compared),
            wait=GRACE_SECONDS if resume else 0.0,
        )
    )
    options: Options = job.settings
    with join_processes(options.device, options.parallel, getattr(options, "tensor_parallel", 1)) as processes:
        bar = bar and processes.first
        transformers.utils.logging.disable_progress_bar()
        stage.check(job, processes)
        earlier = processes.by_first(lambda: result_to_keep(job.folder) if job.resumes else None)
        if earlier is not None and earlier["status"] in ENDED:
            if (job.folder / MODEL).is_dir():
                processes.by_first(lambda: _push(job.settings))
            return earlier
        stage.read(processes, bar=bar)  # before Lamina changes the folder, because the data may be unreadable
        with ExitStack() as held:
            resumes = processes.by_first(lambda: _claim(held, job, stage))
            complete: Options = stage.settings
            # show the choices for auto
            if bar and (options.precision == "auto" or options.compile != complete.compile):
                compiled = "compiled" if complete.compile == "on" else "eager"
                show_line(f"{complete.precision}, {compiled} (--precision, --compile)")
            if bar and not resumes and (note := stage.note()):
                show_line(f"note: {note}")
            return _recorded(
                lambda: _run(stage, processes, resume=resumes, bar=bar),
                job.folder,
                processes,
                seconds=float((earlier or {}).get("seconds") or 0.0),
            )


def _claim(held: ExitStack, job: Job[S], stage: TrainingStage[S]) -> bool:
    """Lock the folder, and write the run's settings, placement and data. Return whether the run resumes."""
    if job.resumes:
        stage.identity.refuse_changes(job.folder)
    held.enter_context(job)
    (job.folder / RESULT).unlink(missing_ok=True)
    job.write_config(stage.settings.to_dict())
    if stage.plan is not None:
        job.write_json(PLAN, stage.plan.to_dict())
    job.write_json(DATA, stage.identity.text)
    return job.resumes


def _recorded(run: Callable[[], Json], folder: Path, processes: Processes, *, seconds: float) -> Json:
    """Execute a run, and write result.json unless a UserError ends the run. ``seconds`` counts the earlier attempts."""
    began = time.monotonic()

    def write(result: Json) -> Json:
        result["seconds"] = round(seconds + time.monotonic() - began, 2)
        if processes.first:
            write_result(folder, result)
        return result

    try:
        result = run()
    except KeyboardInterrupt:
        return write({"status": str(Status.INTERRUPTED), "reason": "stopped at once"})
    except UserError:
        raise
    except Exception as error:
        if disk_full(error):
            full = full_disk(folder)
            if not processes.first:
                mark_reported(full)  # only the first process reports the full disk
            raise full from error
        reason = GONE if lost_another(error) else f"{type(error).__name__}: {error}"
        write({"status": str(Status.FAILED), "reason": reason})
        raise
    return processes.by_first(lambda: write(result))


def _push(settings: Options) -> None:
    if settings.push_to_hub is not None:
        push(Path(settings.output) / MODEL, settings.push_to_hub)


def _run(stage: TrainingStage[S], processes: Processes, *, resume: bool, bar: bool) -> Json:
    """Train until the run ends. After a divergence, roll back, but not more often than the settings allow."""
    settings: Options = stage.settings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = Path(settings.output)
    rollbacks = processes.by_first(lambda: Rollbacks.read(folder)) if resume else Rollbacks(folder=folder)
    while True:
        run = TrainingRun(stage, processes, rollbacks, resume=resume, bar=bar)
        ended = run.train()
        if not isinstance(ended, Diverged):
            break
        if len(rollbacks.done) >= getattr(settings, "rollback", 0):
            ended = (Status.DIVERGED, ended.reason)
            break
        processes.by_first(partial(_roll_back, settings, rollbacks, ended))
        rollbacks, resume = Rollbacks.read(folder), True
        del run
        gc.collect()
    status, reason = ended
    result = stage.outcome(run, status, reason)
    if status.ended and status != Status.DIVERGED:
        model, card = stage.trained(run, result)
        save_model(model, stage.processor, folder / MODEL, processes, card)
        processes.by_first(lambda: _push(settings))
        processes.by_first(stage.saved)
    return result


def _roll_back(settings: Options, rollbacks: Rollbacks, diverged: Diverged) -> None:
    folder = Path(settings.output)
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoint = checkpoints.newest(
        lambda state: rollbacks.allows(state) and is_good(state) and state["step"] < diverged.step
    )
    step = step_of(checkpoint) if checkpoint else 0
    keep_abandoned(folder, step, len(rollbacks.done) + 1)
    entry = rollbacks.add(
        step=step,
        diverged_at=diverged.step,
        reason=diverged.reason,
        factor=settings.rollback_factor,
        skip=settings.rollback_skip,
    )
    checkpoints.discard_after(step)
    logger.warning(
        "rollback %d of %d: %s. Lamina goes back to step %d, skips the data of steps %d to %d, and multiplies the "
        "learning rates by %g",
        *(entry.number, settings.rollback, diverged.reason, step, *entry.skipped, entry.learning_rate_factor),
    )


class TrainingRun:
    """One attempt at a run in this process, from the beginning or from a checkpoint.

    Args:
        stage: the kind of run. The stage must have read the data.
        rollbacks: the run's rollbacks so far.
        resume: whether to continue from the newest intact checkpoint.

    Attributes:
        average: the moving average of the weights, or None. The stage sets this attribute and the attributes below.
        step_factors: each parameter's learning rate factors.
        followed: the layers that Lamina found in a model with a transformers class, or None.
        items: the training items (only in pretraining).
    """

    average: WeightAverage | None = None
    step_factors: dict[str, StepFactors] | None = None
    followed: Followed | None = None
    items: ItemSource

    def __init__(self, stage: TrainingStage[S], processes: Processes, rollbacks: Rollbacks, *, resume: bool, bar: bool):
        self.stage, self.processes, self.rollbacks, self.bar = stage, processes, rollbacks, bar
        self.settings: Options = stage.settings
        self.folder = Path(self.settings.output)
        self.model = stage.model(self)
        checkpoints, state, self.checkpoint = self.folder / "checkpoints", {}, None
        if resume:  # without a checkpoint, the run starts again at step 0
            self.checkpoint = processes.by_first(lambda: checkpoint_to_resume(checkpoints, rollbacks))
            state = run_state(self.checkpoint) if self.checkpoint else {"step": -1}
        self.done = max(0, int(state.get("step", 0)))
        self.guard = stage.guard()
        self.order = stage.order(self)
        owned = None if self.followed is None else found_parameters(self.model, self.followed.structure)
        self.updates = UpdateRatios(GradientNorms(self.model, owned))
        self.recorder = self._make_recorder()
        self._further = stage.callbacks(self)
        trackers = None if self.recorder.records is None else self.recorder.records.trackers
        self.callbacks = [self.updates, self.recorder, *tensorboard(trackers), *self._further]
        self.states: list[Any] = [
            self.recorder,  # first, because the recorder syncs files that the other states refer to
            rollbacks,
            stage.identity,
            *stage.states(self),
            *(callback for callback in self._further if hasattr(callback, "load_state_dict")),
        ]
        self.trainer = self._make_trainer()
        self.trainer.load_state_dict(state)

    def _make_recorder(self) -> RunRecorder:
        stage, tokens = self.stage, partial(self.stage.tokens, self)
        rollbacks = [{"rollback": r.number, "tokens": tokens(r.step), **asdict(r)} for r in self.rollbacks.done]
        return stage.recorder(
            records=Writers(self.folder, self.settings.report_to, rollbacks) if self.processes.first else None,
            guard=self.guard,
            monitor_inputs=stage.monitor_inputs(),
            tokens_of=tokens,
            derived=stage.derived,
            show_bar=self.bar,
            processes=self.processes,
            realized=lambda steps: stage.realized(self, steps),
            updates=self.updates,
            measure=lamina_rows if self.followed is None else self.followed.rows,
            gains_of=lamina_gains if self.followed is None else self.followed.gains,
            pause_step=self.settings.pause_step,
            full_speed=stage.full_speed(self),
            unit=stage.unit,
        )

    def _make_trainer(self) -> Any:
        trainer = self.stage.trainer(self)
        if self.settings.async_checkpoints:
            trainer.background = Background(self.processes)
        trainer.processor = self.stage.processor
        trainer.series, trainer.gradient_norms = self.recorder.series, self.updates.groups
        trainer.remove_callback(PrinterCallback)  # with ``disable_tqdm``, Trainer adds only this printer
        for callback in (self.recorder, *self._further):
            callback.trainer = trainer  # type: ignore[attr-defined]
        return trainer

    def train(self) -> tuple[Status, str] | Diverged:
        """Train the model. Return the run's status and the reason, which are equal in every process."""
        trainer, recorder, steps = self.trainer, self.recorder, self.settings.steps
        self._warn_of_repetition()
        with stop_signals(recorder), ExitStack() as ending:
            ending.callback(recorder.close)
            if trainer.background is not None:
                ending.callback(trainer.background.wait)
            try:
                if self.checkpoint is not None and step_of(self.checkpoint) >= steps:
                    trainer._load_from_checkpoint(str(self.checkpoint))  # Trainer would train another step
                    trainer._move_model_to_device(trainer.bare_model(), trainer.args.device)
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                else:
                    if self.stage.evaluates_first and self.checkpoint is None:
                        trainer.evaluate()
                    trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
                step = trainer.state.global_step
                if step >= steps and self.processes.by_first(lambda: not recorder.has_evaluated(step)):
                    trainer.evaluate()
            except Diverged as diverged:
                recorder.record_divergence(diverged)
                return diverged

        def verdict() -> tuple[Status, str] | Diverged:
            if recorder.interrupted and step < steps:
                return Status.INTERRUPTED, f"{recorder.interrupted} at step {step}"
            return self.stage.verdict(self)

        return self.processes.by_first(verdict)

    def _warn_of_repetition(self) -> None:
        if not self.processes.first or self.checkpoint is not None:
            return
        for name, part in self.stage.realized(self, self.settings.steps).items():
            if (epochs := part.get("epochs", 0.0)) > 1:
                logger.warning("corpus %s: this run trains on the whole corpus %.2f times", name, epochs)
