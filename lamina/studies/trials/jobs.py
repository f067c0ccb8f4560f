"""What a trial may be: each job with its settings and the function that runs it, imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from lamina.core.json_types import Json
from lamina.jobs.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """A kind of trial.

    Attributes:
        name: as the YAML of a study says it.
        settings: "module:class" of its settings, which have ``output``, ``seed`` and ``placement``.
        run: "module:function"; it takes the settings, ``resume`` and ``bar``, and writes a run's folder.
        trains: whether it leaves a trained model.
    """

    name: str
    settings: str
    run: str
    trains: bool = True

    def settings_class(self) -> type[Settings]:
        """The class of the settings."""
        return cast(type[Settings], _load(self.settings))

    def function(self) -> Callable[..., Json]:
        """The function that runs a trial."""
        return cast(Callable[..., Json], _load(self.run))


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


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
            run="lamina.studies.trials.initial:initialize",
            trains=False,
        ),
        TrialJob(
            name="max-lr",
            settings="lamina.studies.max_rate_settings:MaxRateSettings",
            run="lamina.studies.max_rate:run_max_rate",
        ),
    )
}
