"""Pretraining: settings in, a run's folder out."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from lamina.core.json_types import Json
from lamina.core.values import text
from lamina.data.blocks import Splits
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.model_folder import MODEL, refuse_as_output
from lamina.jobs.names import CONFIG, PLAN, RESULT
from lamina.jobs.status import ENDED, Status
from lamina.training import source
from lamina.training.checkpointing.checkpoints import Checkpoints, step_of
from lamina.training.checkpointing.resuming import (
    DATA,
    Rollbacks,
    RunIdentity,
    is_good,
    result_to_keep,
    stored_settings,
)
from lamina.training.checkpointing.saved_model import ModelCard, push, save_model
from lamina.training.execution.processes import Processes, join, reported_once
from lamina.training.execution.recorded import recorded
from lamina.training.monitor.guard import Diverged, MakeGuard, usual_guard
from lamina.training.monitor.writers import keep_abandoned
from lamina.training.objectives.objective import Processor
from lamina.training.outcome import outcome, verdict
from lamina.training.resolve import POLICY, ResolvedRun, resolve_run
from lamina.training.run import TrainingRun
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0  # for a killed study's worker that still writes its checkpoint


def pretrain(
    settings: PretrainSettings | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
    guard: MakeGuard = usual_guard,
) -> Json:
    """Train a model, from scratch or from a checkpoint, and write the run's folder; returns its result.json.

    ``settings`` are a whole record, or only the user's settings, by name. A run that diverges, gets stuck or is
    interrupted ends with that status, not with an exception. With ``resume``, a folder with a finished run is left
    unchanged; otherwise the run resumes from its newest whole checkpoint. ``guard`` makes what ends the run early.

    If torchrun or accelerate launch started several processes, all call this with the same settings: the first one
    writes the folder, and all return the same result.

    Raises:
        UserError: for invalid settings, a corpus that can't be read, an output folder in use, settings that differ
            from those of the run to resume, a text that has changed.
        OSError: the disk is full.
    """
    job = reported_once(lambda: _open(settings, resume=resume, overwrite=overwrite))
    with join(job.settings.device, job.settings.parallel) as processes:
        bar = bar and processes.first
        resolved = processes.by_first(lambda: _resolve(job, processes))
        earlier = processes.by_first(lambda: result_to_keep(job.folder) if job.resumes else None)
        if earlier is not None and earlier["status"] in ENDED:
            if (job.folder / MODEL).is_dir():
                processes.by_first(lambda: _push(resolved.settings))
            return earlier
        # before the folder is touched: the corpus may be unreadable
        splits, processor = processes.first_per_host(lambda: read_data(resolved, bar))
        with ExitStack() as held:
            resumes = processes.by_first(lambda: _claim(held, job, resolved, splits))
            if bar and "auto" in (job.settings.precision, job.settings.compile):
                compiled = "compiled" if resolved.settings.compile == "on" else "eager"
                tqdm.write(f"{resolved.settings.precision}, {compiled} (--precision, --compile)", file=sys.stderr)
            seconds = float((earlier or {}).get("seconds") or 0.0)
            modes = {"make_guard": guard, "resume": resumes, "bar": bar}
            run = partial(_run, resolved, splits, processor, processes, **modes)
            return recorded(run, job.folder, processes, resumes=resumes, seconds=seconds)


def _open(settings: PretrainSettings | Mapping[str, Any], *, resume: Resume, overwrite: bool) -> Job[PretrainSettings]:
    given = settings if isinstance(settings, Mapping) else source.with_checkpoint(settings)
    if isinstance(given, Mapping) and given.get("from_model"):
        output = text("output", given.get("output", PretrainSettings.output))
        refuse_as_output(output, text("from_model", given["from_model"]))
    return open_job(
        Kind.RUN,
        PretrainSettings,
        given,
        resume=resume,
        overwrite=overwrite,
        policy=POLICY,
        stored=lambda folder: stored_settings(folder, POLICY.free),
        wait=GRACE_SECONDS if resume else 0.0,
    )


def _resolve(job: Job[PretrainSettings], processes: Processes) -> ResolvedRun:
    """The run of the job's settings, completed by the checkpoint of ``--from``."""
    settings = source.with_checkpoint(job.settings, job.given)
    if job.resumes:
        POLICY.merge(job.settings.to_dict(), settings.to_dict(), {})  # the checkpoint may have changed
    return resolve_run(settings, processes.size, parallel=processes.parallel)


def _claim(held: ExitStack, job: Job[PretrainSettings], resolved: ResolvedRun, splits: Splits) -> bool:
    """Claim the folder and write what the run computes; returns whether it resumes."""
    identity = RunIdentity(resolved.settings, resolved.plan, splits.stats.fingerprint)
    if job.resumes:
        identity.refuse_changes(job.folder)
    held.enter_context(job)
    (job.folder / RESULT).unlink(missing_ok=True)
    job.write_yaml(CONFIG, resolved.settings.to_dict())
    job.write_json(PLAN, resolved.plan.to_dict())
    job.write_json(DATA, identity.text)
    return job.resumes


def read_data(resolved: ResolvedRun, bar: bool) -> tuple[Splits, Processor]:
    """The data of a run, and its tokenizer or image processor; ``bar``: show progress."""
    return resolved.objective.read(resolved.settings, resolved.backbone, bar=bar)


def _run(
    resolved: ResolvedRun,
    splits: Splits,
    processor: Processor,
    processes: Processes,
    *,
    make_guard: MakeGuard,
    resume: bool,
    bar: bool,
) -> Json:
    """Train until the run ends; after a divergence, roll back as often as ``rollback`` allows."""
    transformers.utils.logging.disable_progress_bar()
    settings = resolved.settings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = Path(settings.output)
    rollbacks = processes.by_first(lambda: Rollbacks.read(folder)) if resume else Rollbacks(folder=folder)
    while True:
        guard = make_guard(settings, splits.stats.unigram_entropy)
        run = TrainingRun(resolved, splits, processor, processes, rollbacks, guard=guard, resume=resume, bar=bar)
        complete = run.train()
        ended = complete if isinstance(complete, Diverged) else processes.by_first(partial(verdict, run, complete))
        if not isinstance(ended, Diverged):
            break
        if len(rollbacks.done) >= settings.rollback:
            ended = (Status.DIVERGED, ended.reason)
            break
        processes.by_first(partial(_roll_back, settings, rollbacks, ended))
        rollbacks, resume = Rollbacks.read(folder), True
        del run
        gc.collect()
    status, reason = ended
    result = outcome(run, status, reason)
    if status.ended and status != Status.DIVERGED:
        trained = run.model if run.average is None else run.average.model
        save_model(trained, processor, folder / MODEL, processes, _card(run, result))
        processes.by_first(lambda: _push(settings))
    return result


def _card(run: TrainingRun, result: Json) -> ModelCard:
    objective, settings = run.resolved.objective, run.settings
    return ModelCard(
        head=objective.head,
        data=objective.facts(settings, run.splits.stats),
        result=result,
        command=settings.command(),
        base_model=settings.from_model,
    )


def _push(settings: PretrainSettings) -> None:
    """Upload the run's model if the settings ask for it."""
    if settings.push_to_hub is not None:
        push(Path(settings.output) / MODEL, settings.push_to_hub)


def _roll_back(settings: PretrainSettings, rollbacks: Rollbacks, diverged: Diverged) -> None:
    """Choose the checkpoint to roll back to, and record the rollback."""
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
        "rollback %d of %d: %s; back to step %d, skipping the data of steps %d to %d, learning rates times %g",
        *(entry.number, settings.rollback, diverged.reason, step, *entry.skipped, entry.learning_rate_factor),
    )
