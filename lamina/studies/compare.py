"""Compare norm placements on the same text, or find the learning rate at which training fails."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pandas as pd
from tqdm.auto import tqdm

from lamina.core.json_types import Json
from lamina.core.progress import has_bars
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.environment import cores, environment
from lamina.jobs.files import as_json, read_result, write_text
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job, ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULTS
from lamina.jobs.status import ENDED
from lamina.modeling.processes import launched
from lamina.studies.max_rate_rules import MaxRateGuard, MaxRateRules
from lamina.studies.record import refuse_another_trial, stored_study, write_study
from lamina.studies.running import run_tasks, usual_workers
from lamina.studies.settings import CompareSettings, MaxRateSettings, MaxRateStudySettings, TransferSettings
from lamina.studies.task import Task
from lamina.training.checkpointing.resuming import is_model_damaged, refuse_another_text
from lamina.training.execution.devices import decided
from lamina.training.monitor.guard import DivergenceGuard
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.setting_groups import GuardSettings
from lamina.training.settings import PretrainSettings

G = TypeVar("G", CompareSettings, MaxRateStudySettings, TransferSettings)
OneRun: TypeAlias = PretrainSettings | MaxRateSettings


def compare(
    settings: CompareSettings | Mapping[str, Any], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> pd.DataFrame:
    """Train every placement at every learning rate and seed. Returns the table of results.csv.

    The table has a row for each training run, including failed, diverged and stuck runs. With ``resume``, Lamina skips
    finished runs and continues the other runs from their last checkpoints.

    Raises:
        UserError: a setting is invalid, Lamina cannot read the corpus, the output folder holds files, or a resumed
            comparison has other settings.
        OSError: the disk is full.
        KeyboardInterrupt: Lamina first ends the current runs as `interrupted` and writes results.csv.
    """
    job, complete, trials = open_study(Kind.COMPARE, CompareSettings, settings, resume, overwrite, bar)
    with job:
        return run_missing(job, complete, trials, bar=bar)


def max_lr(
    settings: MaxRateStudySettings | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> pd.DataFrame:
    """Raise the learning rate until training fails, for every placement and seed. Returns the table of results.csv.

    The arguments and errors are the same as in ``compare``.
    """
    job, complete, trials = open_study(Kind.MAX_LR, MaxRateStudySettings, settings, resume, overwrite, bar)
    with job:
        return run_missing(job, complete, trials, bar=bar, keys=("placement", "seed"), of_trial=run_max_rate)


def open_study(
    kind: Kind, record: type[G], settings: G | Mapping[str, Any], resume: Resume, overwrite: bool, bar: bool
) -> tuple[Job[G], G, Mapping[str, OneRun]]:
    """Open a study's folder, check the runs, and cache their data. Return the job, its settings, and each run's
    settings.
    """
    policy = ResumePolicy(what="study", free=record.free())
    job = open_job(kind, record, settings, resume=resume, overwrite=overwrite, policy=policy, stored=stored_study)
    if (count := launched()[1]) > 1:
        raise UserError(
            f"WORLD_SIZE: you started {count} processes, but {record.command_name} starts the processes itself. Start "
            "one process and set --workers."
        )
    complete = decided(job.settings)
    trials: Mapping[str, OneRun] = complete.trials()
    runs = [trial.run() if isinstance(trial, MaxRateSettings) else trial for trial in trials.values()]
    plans: dict[str, Json] = {}
    for run in tqdm(runs, unit=" trials", desc="checking", disable=not (bar and resume and has_bars()), delay=1.0):
        kind_of_run = repr({**run.to_dict(), "output": "", "seed": 0, "learning_rate": 0})
        if kind_of_run not in plans or not (resume and is_ended(run)):
            plans[kind_of_run] = as_json(resolve_run(run).plan.to_dict())
        if resume:
            refuse_another_trial(run, plans[kind_of_run])
    splits, _ = resolve_run(runs[0]).read(bar=bar)
    for run in runs:
        if read_result(Path(run.output)) is not None:
            refuse_another_text(run, Path(run.output), splits.stats.fingerprint)
    return job, complete, trials


def is_ended(run: PretrainSettings) -> bool:
    """Return whether a run has finished. Raises UserError if somebody edited the run's result.json."""
    result = read_result(Path(run.output))
    return result is not None and result["status"] in ENDED


def run_missing(
    job: Job[G],
    complete: G,
    trials: Mapping[str, OneRun],
    *,
    bar: bool,
    keys: Sequence[str] = ("placement", "learning_rate", "seed"),
    of_trial: Callable[..., Json] = pretrain,
) -> pd.DataFrame:
    """Execute the unfinished runs of a study. Return results.csv's table, with the settings ``keys`` as columns."""
    settings, folder = job.settings, job.folder
    workers = min(settings.workers or usual_workers(), len(trials))
    # On small models, two processes with one thread each beat one process with two.
    threads = max(1, cores() // workers)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    header: Json = {} if job.kind == Kind.COMPARE else {"kind": str(job.kind)}
    run = {"command": settings.command(), "version": environment(0)["versions"].get("lamina"), "created": created}
    write_study(folder, {**header, **run, "settings": complete.to_dict()})
    results: dict[str, Json] = {}
    for trial, settings_of_trial in trials.items():
        result = read_result(Path(settings_of_trial.output))
        if result is not None and result["status"] in ENDED and not is_model_damaged(Path(settings_of_trial.output)):
            results[trial] = result
    missing = {t: replace(s, threads=s.threads or threads) for t, s in trials.items() if t not in results}
    tasks = {trial: Task(settings=s, job=of_trial) for trial, s in missing.items()}
    names = list(dict.fromkeys([*columns.names(), *keys]))

    def write() -> pd.DataFrame:
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


def run_max_rate(settings: MaxRateSettings, *, resume: Resume = False, bar: bool = True) -> Json:
    """Raise a run's learning rate until training fails. Returns result.json. Raises the errors of ``pretrain``."""

    def guard(run: GuardSettings, unigram_entropy: float) -> DivergenceGuard:
        rules = MaxRateRules(settings, unigram_entropy)
        return MaxRateGuard(margin=run.divergence_margin, patience=run.divergence_patience, rules=rules)

    return pretrain(settings.run(), resume=resume, bar=bar, guard=guard)
