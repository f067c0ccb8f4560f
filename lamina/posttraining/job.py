"""A job after pretraining, from its settings to its folder: the same for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
import transformers

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job as Opened
from lamina.jobs.job import open_job
from lamina.jobs.model_folder import MODEL
from lamina.jobs.names import CONFIG, PLAN, RESULT
from lamina.jobs.resume import ResumePolicy
from lamina.jobs.status import ENDED, Status
from lamina.posttraining.card import card_of
from lamina.posttraining.identity import TuningIdentity
from lamina.posttraining.run import Job, TuningRun
from lamina.posttraining.settings import TuningSettings, with_preset
from lamina.posttraining.stage import Stage
from lamina.posttraining.starting import find_start, merged, require_libraries
from lamina.training.arguments import check_arguments
from lamina.training.checkpointing.resuming import result_to_keep, stored_settings
from lamina.training.checkpointing.saved_model import check_repository, push, save_model
from lamina.training.execution.devices import decided
from lamina.training.execution.processes import Processes, join, reported_once
from lamina.training.execution.recorded import recorded
from lamina.training.pretrain import GRACE_SECONDS

S = TypeVar("S", bound=TuningSettings)
POLICY = ResumePolicy(what="run", free=TuningSettings.undecided(), compared=frozenset(("from_model", "reward_model")))


def tune(
    stage: Stage[S],
    settings: S | Mapping[str, object],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Json:
    """Run a job after pretraining and write its folder; returns its result.json.

    ``settings`` are a whole record, or the user's, by name. A run that diverges or is interrupted ends with that
    status, not with an exception. With ``resume``, a folder with a finished run is left unchanged; otherwise the run
    resumes from its newest whole checkpoint. Several processes (torchrun) all call this with the same settings.

    Raises:
        UserError: for invalid settings, data or a model that can't be read, a tokenizer that does not fit, an output
            folder in use, data or a model that have changed since the run to resume began.
        OSError: the disk is full.
    """
    opened = reported_once(lambda: _open(stage, settings, resume=resume, overwrite=overwrite))
    with join(opened.settings.device, opened.settings.parallel) as processes:
        if processes.parallel != "ddp":
            raise UserError("fsdp: accelerate's configuration asks for it (allowed here: ddp)")
        earlier = processes.by_first(lambda: result_to_keep(opened.folder) if opened.resumes else None)
        if earlier is not None and earlier["status"] in ENDED:
            return earlier
        transformers.utils.logging.disable_progress_bar()
        job = processes.first_per_host(lambda: _ready(stage, opened.settings))
        with ExitStack() as held:
            resumes = processes.by_first(lambda: _claim(held, opened, job))
            seconds = float((earlier or {}).get("seconds") or 0.0)
            return recorded(
                lambda: _run(job, processes, resume=resumes, bar=bar and processes.first),
                opened.folder,
                processes,
                resumes=resumes,
                seconds=seconds,
            )


def _open(stage: Stage[S], settings: S | Mapping[str, object], *, resume: Resume, overwrite: bool) -> Opened[S]:
    require_libraries(str(stage.kind))
    given = settings.to_dict() if isinstance(settings, TuningSettings) else with_preset(dict(settings))
    for name in ("steps", "sequence_length"):  # the run decides them when it begins, and keeps them
        if not given.get(name):
            given.pop(name, None)
    return open_job(
        stage.kind,
        stage.settings,
        given,
        resume=resume,
        overwrite=overwrite,
        policy=POLICY,
        stored=lambda folder: stored_settings(folder, POLICY.free | POLICY.compared, stage.settings),
        wait=GRACE_SECONDS if resume else 0.0,
    )


def _ready(stage: Stage[S], settings: S) -> Job:
    """Read everything that the job needs, before its folder is touched."""
    import datasets

    datasets.disable_progress_bars()
    settings.require(*settings.needed)
    if settings.push_to_hub is not None:
        check_repository(settings.push_to_hub)
    check_arguments(settings.trainer, settings.schedule, type(settings))
    start = find_start(settings)
    others = stage.others(settings, start)
    examples = stage.examples(settings, start)
    complete = replace(decided(settings), steps=examples.steps(settings), sequence_length=start.longest)
    identity = TuningIdentity(complete, examples.fingerprint, start.fingerprint, others)
    return Job(stage=stage, settings=complete, start=start, examples=examples, identity=identity)


def _claim(held: ExitStack, opened: Opened[S], job: Job) -> bool:
    """Claim the folder and write what the run computes; returns whether it resumes."""
    if opened.resumes:
        job.identity.refuse_changes(opened.folder)
    held.enter_context(opened)
    (opened.folder / RESULT).unlink(missing_ok=True)
    opened.write_yaml(CONFIG, job.settings.to_dict())
    opened.write_json(PLAN, job.start.plan.to_dict())
    job.identity.write(opened.folder)
    return opened.resumes


def _run(job: Job, processes: Processes, *, resume: bool, bar: bool) -> Json:
    settings, folder = job.settings, Path(str(job.settings.output))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    with warnings.catch_warnings():
        # TRL reads the name that transformers had for it before 5.23
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        run = TuningRun(job, processes, resume=resume, bar=bar)
        status, reason = run.train()
    result = run.outcome(status, reason)
    if status == Status.FINISHED:
        result |= job.stage.finish(run.setup, run.trainer)
        result |= run.best.restore()
        adapter = folder / "adapter" if processes.first else None
        model, card = merged(run.model, run.tuner, adapter), card_of(settings, result, job.stage.head)
        save_model(model, job.start.tokenizer, folder / MODEL, processes, card)
        processes.by_first(lambda: _push(settings))
        processes.by_first(run.best.forget)
    return cast("Json", result)


def _push(settings: TuningSettings) -> None:
    """Upload the run's model if the settings ask for it."""
    if settings.push_to_hub is not None:
        push(Path(str(settings.output)) / MODEL, settings.push_to_hub)
