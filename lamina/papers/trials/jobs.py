"""What a trial may be: each job with its settings and the function that runs it, imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from lamina.core.json_types import Json
from lamina.jobs import catalog
from lamina.jobs.catalog import load
from lamina.jobs.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """A kind of trial.

    Attributes:
        name: as the YAML of a study says it.
        settings: "module:class" of its settings, which have ``output`` and ``seed``.
        run: "module:function"; it takes the settings, ``resume`` and ``bar``, and writes a run's folder.
        trains: whether it leaves a trained model.
        inputs: the settings that take the folder of an earlier trial, the main one first; empty for a job that starts
            a chain, whose settings have ``placement``.
        files: the settings that name data or code, which an identity has by its content.
        seeded: whether the seed of a chain is the job's, too.
        columns: "module:function" from result.json to the numbers of a row; "" for the result's own.
    """

    name: str
    settings: str
    run: str
    trains: bool = True
    inputs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    seeded: bool = True
    columns: str = ""

    def settings_class(self) -> type[Settings]:
        """The class of the settings."""
        return cast(type[Settings], load(self.settings))

    def numbers(self, result: Json) -> Json:
        """What a row has of a result."""
        return cast(Callable[[Json], Json], load(self.columns))(result) if self.columns else result


JOBS = {
    job.name: job
    for job in (
        TrialJob(
            name="pretrain",
            settings="lamina.training.settings:PretrainSettings",
            run="lamina.training.pretrain:pretrain",
        ),
        TrialJob(
            name="init",
            settings="lamina.training.settings:PretrainSettings",
            run="lamina.papers.trials.initial:initialize",
            trains=False,
        ),
        TrialJob(
            name="max-lr",
            settings="lamina.studies.max_rate_settings:MaxRateSettings",
            run="lamina.studies.max_rate:run_max_rate",
        ),
        *(
            TrialJob(name=row.name, settings=row.settings, run=row.run, inputs=row.inputs, files=row.files)
            for row in catalog.JOBS.values()
            if row.inputs[:1] == ("from_model",) and row.files
        ),
        TrialJob(
            name="eval",
            settings="lamina.evaluation.settings:EvalSettings",
            run="lamina.evaluation.job:evaluate",
            trains=False,
            inputs=("models",),
            files=("tasks",),
            seeded=False,
            columns="lamina.papers.trials.scores:columns_of",
        ),
    )
}
