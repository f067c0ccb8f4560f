"""Studies of placements: side by side on the same text, or each under a learning rate that rises until it fails."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.environment import environment
from lamina.jobs.files import read_result, write_text
from lamina.jobs.folder import Resume
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULTS
from lamina.jobs.status import ENDED
from lamina.studies.record import (
    refuse_another_plan,
    refuse_another_trial,
    stored_study,
    write_study,
)
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

COLUMNS = columns.names()
OneRun: TypeAlias = PretrainSettings | MaxRateSettings
_FROM_SETTINGS = ("placement", "learning_rate", "seed")


POLICY = ResumePolicy(what="study", free=CompareSettings.undecided())


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
    job = open_job(
        Kind.COMPARE, CompareSettings, settings, resume=resume, overwrite=overwrite, policy=POLICY, stored=stored_study
    )
    complete = decided(job.settings)
    trials = complete.trials()
    refuse_launcher(complete.command_name)
    for trial in trials.values():
        plan = resolve_run(trial).plan
        if resume:
            refuse_another_plan(Path(trial.output), trial.placement, plan)
            refuse_another_trial(trial)
    read_study_data(list(trials.values()), bar)
    with job:
        return run_study(job.settings, complete.to_dict(), trials, job.folder, bar=bar)


def read_study_data(trials: Sequence[PretrainSettings], bar: bool) -> None:
    """Read a study's data, which all its trials then find in the cache; ``bar``: show progress.

    Raises UserError for data that can't be read, or with which a trial that ended was not trained.
    """
    splits, _ = resolve_run(trials[0]).read(bar=bar)
    for trial in trials:
        if read_result(Path(trial.output)) is not None:
            refuse_another_text(trial, Path(trial.output), splits.stats.fingerprint)


def refuse_launcher(command: str) -> None:
    """Raise UserError where a launcher (torchrun, accelerate) has started several processes of a study."""
    if (count := launched()[1]) > 1:
        raise UserError(
            f"WORLD_SIZE: {count} processes (allowed: 1, since {command} starts its own: see --workers; "
            "lamina pretrain trains one model in several)"
        )


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
    study = {
        **(header or {}),
        "command": settings.command(),
        "version": environment(0)["versions"].get("lamina"),
        "created": created,
    }
    write_study(folder, {**study, "settings": recorded})
    results = {t: r for t, s in trials.items() if (r := read_result(Path(s.output))) and r["status"] in ENDED}
    todo = {t: s for t, s in trials.items() if t not in results}
    tasks = {trial: Task(settings=s, job=job) for trial, s in todo.items()}

    def ended(trial: str, result: Json) -> None:
        results[trial] = result
        write_results(folder, trials, results, keys)

    write_results(folder, trials, results, keys)
    run_tasks(tasks, done=len(results), workers=workers, bar=bar, ended=ended)
    return write_results(folder, trials, results, keys)


def write_results(
    folder: Path,
    trials: Mapping[str, OneRun],
    results: dict[str, Json],
    keys: Sequence[str] = _FROM_SETTINGS,
) -> pd.DataFrame:
    """Write results.csv, one row per trial that has ended, and return it."""
    rows = [
        {**dict.fromkeys(COLUMNS), **results[t], **{k: getattr(s, k) for k in keys}, "trial": t}
        for t, s in trials.items()
        if t in results
    ]
    table = pd.DataFrame(rows, columns=[*COLUMNS, *(key for key in keys if key not in COLUMNS)])
    write_text(folder / RESULTS, table.to_csv(index=False))
    return table


KEYS = ("placement", "seed")
POLICY = ResumePolicy(what="study", free=MaxRateStudySettings.undecided())


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
    modes: Json = {"resume": resume, "overwrite": overwrite, "policy": POLICY, "stored": stored_study}
    job = open_job(Kind.MAX_LR, MaxRateStudySettings, settings, **modes)
    complete = decided(job.settings)
    trials = complete.trials()
    refuse_launcher(complete.command_name)
    runs = {name: trial.run() for name, trial in trials.items()}
    for run in runs.values():
        plan = resolve_run(run).plan
        if resume:
            refuse_another_plan(Path(run.output), run.placement, plan)
            refuse_another_trial(run)
    read_study_data(list(runs.values()), bar)
    with job:
        modes = {"header": {"kind": str(Kind.MAX_LR)}, "keys": KEYS, "job": "lamina.studies.compare:run_max_rate"}
        return run_study(job.settings, complete.to_dict(), trials, job.folder, bar=bar, **modes)
