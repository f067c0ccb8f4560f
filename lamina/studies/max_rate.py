"""`lamina max-lr`: how high a learning rate each placement tolerates, by Keel's protocol (arXiv 2601.19895).

A trial is one run with one linear warm-up from 0, all else as in `lamina pretrain`. It ends where a rule of
``lamina.training.monitor.max_rate_rules`` holds; its result is the rate just before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.resume import ResumePolicy
from lamina.studies.compare import read_study_data, refuse_launcher, run_study
from lamina.studies.max_rate_settings import MaxRateSettings, MaxRateStudySettings
from lamina.studies.record import refuse_another_plan, refuse_another_trial, stored_study
from lamina.training.execution.devices import decided
from lamina.training.monitor.guard import DivergenceGuard
from lamina.training.monitor.max_rate_rules import MaxRateGuard
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.setting_groups import GuardSettings

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
        modes = {"header": {"kind": str(Kind.MAX_LR)}, "keys": KEYS, "job": "lamina.studies.max_rate:run_max_rate"}
        return run_study(job.settings, complete.to_dict(), trials, job.folder, bar=bar, **modes)
