"""Studies of placements: side by side on the same text, or each under a learning rate that rises until it fails."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pandas as pd

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.environment import environment
from lamina.jobs.files import read_result, write_text
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job, ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULTS
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED
from lamina.studies.record import refuse_another_trial, stored_study, write_study
from lamina.studies.running import cores, run_tasks
from lamina.studies.settings import CompareSettings, MaxRateSettings, MaxRateStudySettings
from lamina.studies.task import Task
from lamina.training.checkpointing.resuming import refuse_another_text
from lamina.training.execution.devices import decided
from lamina.training.execution.processes import launched
from lamina.training.monitor.guard import DivergenceGuard
from lamina.training.monitor.max_rate_rules import MaxRateGuard
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.setting_groups import GuardSettings
from lamina.training.settings import PretrainSettings

S = TypeVar("S", bound=Settings)
OneRun: TypeAlias = PretrainSettings | MaxRateSettings
_FROM_SETTINGS = ("placement", "learning_rate", "seed")


def compare(
    settings: CompareSettings | Mapping[str, Any], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> pd.DataFrame:
    """Train every placement at every learning rate and seed; returns the rows of results.csv, in the trials' order.

    ``settings`` are a whole record, or only the user's settings, by name. A trial that fails, diverges or gets stuck is
    a row with that status. With ``resume``, trials that ended are skipped and the others resume from their last
    checkpoint.

    Raises:
        UserError: for invalid settings, a corpus that can't be read, an output folder in use, settings or placements
            that differ from those of the study to resume.
        OSError: the disk is full.
        KeyboardInterrupt: after the running trials have ended as `interrupted` and results.csv is written.
    """
    job = open_study(Kind.COMPARE, CompareSettings, settings, resume=resume, overwrite=overwrite)
    complete = decided(job.settings)
    trials = complete.trials()
    check_trials(list(trials.values()), resume=resume, bar=bar)
    with job:
        return run_study(job.settings, complete.to_dict(), trials, job.folder, bar=bar)


def open_study(
    kind: Kind, record: type[S], settings: S | Mapping[str, Any], *, resume: Resume, overwrite: bool
) -> Job[S]:
    """Open a study's job. Raises UserError where a launcher (torchrun, accelerate) has started several processes."""
    policy = ResumePolicy(what="study", free=record.undecided())
    job = open_job(kind, record, settings, resume=resume, overwrite=overwrite, policy=policy, stored=stored_study)
    if (count := launched()[1]) > 1:
        raise UserError(
            f"WORLD_SIZE: {count} processes (allowed: 1, since {record.command_name} starts its own: see --workers; "
            "lamina pretrain trains one model in several)"
        )
    return job


def check_trials(trials: Sequence[PretrainSettings], *, resume: Resume, bar: bool) -> None:
    """Check the trials of a study, and read the data that they then find in the cache; ``bar``: show progress.

    Raises UserError for a trial that can't be built, one that ended with other settings, and data that can't be read.
    """
    for trial in trials:
        plan = resolve_run(trial).plan
        if resume:
            refuse_another_trial(trial, plan)
    splits, _ = resolve_run(trials[0]).read(bar=bar)
    for trial in trials:
        if read_result(Path(trial.output)) is not None:
            refuse_another_text(trial, Path(trial.output), splits.stats.fingerprint)


def run_study(
    settings: Any,
    recorded: Json,
    trials: Mapping[str, OneRun],
    folder: Path,
    *,
    bar: bool,
    header: Mapping[str, Any] | None = None,
    keys: Sequence[str] = _FROM_SETTINGS,
    job: str = "lamina.training.pretrain:pretrain",
) -> pd.DataFrame:
    """Run the trials that have not ended yet, in a folder that is ours; returns the rows of results.csv.

    ``settings`` is the study's record (``workers``, ``command()``), ``recorded`` are its values for study.yaml,
    ``header`` are further fields above them, ``keys`` are the trial's settings that are columns of results.csv, ``job``
    is what a trial does, "module:function".
    """
    workers = min(settings.workers or cores(), len(trials))
    # On small models, two processes with one thread each beat one process with two.
    trials = {t: replace(s, threads=s.threads or max(1, cores() // workers)) for t, s in trials.items()}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = {"command": settings.command(), "version": environment(0)["versions"].get("lamina"), "created": created}
    write_study(folder, {**(header or {}), **run, "settings": recorded})
    results = {t: r for t, s in trials.items() if (r := read_result(Path(s.output))) and r["status"] in ENDED}
    tasks = {trial: Task(settings=s, job=job) for trial, s in trials.items() if trial not in results}
    names = list(dict.fromkeys([*columns.names(), *keys]))

    def write() -> pd.DataFrame:
        """Write results.csv, one row per trial that has ended."""
        rows = [
            {**dict.fromkeys(names), **results[t], **{k: getattr(s, k) for k in keys}, "trial": t}
            for t, s in trials.items()
            if t in results
        ]
        table = pd.DataFrame(rows, columns=names)
        write_text(folder / RESULTS, table.to_csv(index=False))
        return table

    def ended(trial: str, result: Json) -> None:
        results[trial] = result
        write()

    write()
    run_tasks(tasks, done=len(results), workers=workers, bar=bar, ended=ended)
    return write()


def run_max_rate(
    settings: MaxRateSettings, *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Raise the learning rate until the run fails; writes a run's folder and returns its result.json.

    Beyond a run's columns, the result has ``max_learning_rate``, ``stop_rule`` and ``loss_at_stop``.

    Raises:
        UserError, OSError: as ``pretrain`` does.
    """

    def guard(run: GuardSettings, unigram_entropy: float) -> DivergenceGuard:
        rules = settings.rules(unigram_entropy)
        return MaxRateGuard(margin=run.divergence_margin, patience=run.divergence_patience, rules=rules)

    return pretrain(settings.run(), resume=resume, overwrite=overwrite, bar=bar, guard=guard)


def max_lr(
    settings: MaxRateStudySettings | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> pd.DataFrame:
    """Raise the learning rate of every placement and seed until it fails; returns the rows of results.csv.

    ``settings`` are a whole record, or only the user's settings, by name. With ``resume``, trials that ended are
    skipped and the others resume from their last checkpoint.

    Raises:
        UserError: for invalid settings, a corpus that can't be read, an output folder in use, settings or placements
            that differ from those of the study to resume.
        OSError: the disk is full.
        KeyboardInterrupt: after the running trials have ended as `interrupted` and results.csv is written.
    """
    job = open_study(Kind.MAX_LR, MaxRateStudySettings, settings, resume=resume, overwrite=overwrite)
    complete = decided(job.settings)
    trials = complete.trials()
    check_trials([trial.run() for trial in trials.values()], resume=resume, bar=bar)
    more: Json = {"header": {"kind": str(Kind.MAX_LR)}, "keys": ("placement", "seed")}
    with job:
        job_of_trial = "lamina.studies.compare:run_max_rate"
        return run_study(job.settings, complete.to_dict(), trials, job.folder, bar=bar, job=job_of_trial, **more)
