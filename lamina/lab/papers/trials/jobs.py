"""The jobs that studies can run. Lamina imports a job's code only when a study runs the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

from lamina.core.json_types import Json
from lamina.evaluation.settings import EvalSettings
from lamina.jobs.folder import Resume
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import PLAN
from lamina.jobs.row import Modes
from lamina.jobs.seals import write_result
from lamina.jobs.settings import Settings
from lamina.jobs.status import Status
from lamina.lab.posttraining import tuning_rows as rows
from lamina.studies.settings import MaxRateSettings
from lamina.training import pretrain_row
from lamina.training.settings import PretrainSettings

SCORE = "score"
"""The column with the mean score over all tasks, in percent. Each task's column is "score_TASK"."""


def columns_of(result: Json) -> Json:
    """Convert an evaluation's scores to columns: the mean score, and each task's score, in percent."""
    if "table" not in result:
        return result
    kept = {name: result[name] for name in ("status", "seconds", "reason") if name in result}
    table = result["table"]
    lines = table["lines"]
    if not lines:
        return kept
    values = list(zip(table["headings"], lines[0]["mean"], table["shares"], strict=True))
    shares = [value for _, value, share in values if share]
    # with several percentages, the last column is their average
    several = len(shares) > 1
    tasks = {
        re.sub(r"\W+", "_", heading).strip("_").lower(): value
        for heading, value, _ in values[: -1 if several else None]
    }
    return {
        **kept,
        **({SCORE: shares[-1]} if shares else {}),
        **{f"{SCORE}_{task}": value for task, value in tasks.items()},
    }


def initialize(settings: PretrainSettings, *, resume: Resume = False, bar: bool = True) -> Json:
    """Write the folder of an untrained model: settings, norm placement, and a result with 0 steps."""
    from lamina.training.resolve import resolve_run  # imports torch

    del bar  # the job is too short for a progress bar
    resolved = resolve_run(settings)
    result: Json = {"status": str(Status.FINISHED), "steps": 0, "init": settings.init, "seconds": 0.0, "reason": ""}
    with open_job(Kind.RUN, PretrainSettings, settings, resume=resume) as job:
        job.write_config(settings.to_dict())
        job.write_json(PLAN, resolved.plan.to_dict())
        write_result(job.folder, result)
    return result


def max_rate(settings: MaxRateSettings, *, resume: Resume = False, bar: bool = True) -> Json:
    from lamina.studies.compare import run_max_rate

    return run_max_rate(settings, resume=resume, bar=bar)


def evaluate(settings: EvalSettings, **modes: Unpack[Modes]) -> Json:
    from lamina.evaluation.job import evaluate as run

    return run(settings, **modes)


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """A job that studies can run."""

    name: str
    settings: Callable[[], type[Settings]]  # a function that returns the class of the job's settings
    run: Callable[..., Json]  # a function that runs the job and writes the run's folder
    trains: bool = True  # whether the job trains and saves a model
    # the settings that name the folders of earlier runs. The first setting is the main input
    inputs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # the settings that name data or code. A change of these files' content makes a new run
    seeded: bool = True
    numbers: Callable[[Json], Json] = lambda result: result  # a function that converts result.json to columns

    def settings_class(self) -> type[Settings]:
        return self.settings()


TRIAL_JOBS = {
    job.name: job
    for job in (
        TrialJob(
            name="pretrain",
            settings=lambda: PretrainSettings,
            run=pretrain_row.pretrain,
        ),
        TrialJob(
            name="init",
            settings=lambda: PretrainSettings,
            run=initialize,
            trains=False,
        ),
        TrialJob(
            name="max-lr",
            settings=lambda: MaxRateSettings,
            run=max_rate,
        ),
        *(
            TrialJob(name=row.name, settings=row.settings, run=row.run, inputs=row.inputs, files=row.files)
            for row in (rows.SFT, rows.REWARD, rows.RLHF, rows.DPO)
        ),
        TrialJob(
            name="eval",
            settings=lambda: EvalSettings,
            run=evaluate,
            trains=False,
            inputs=("models",),
            files=("tasks",),
            seeded=False,
            numbers=columns_of,
        ),
    )
}
