"""The store of trials: each in a folder named by its key, for all studies; and the records of earlier ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.jobs.files import read_result
from lamina.jobs.model_folder import MODEL
from lamina.jobs.status import ENDED, Status
from lamina.studies.trials import measures
from lamina.studies.trials.records import Records
from lamina.studies.trials.task import Task
from lamina.studies.trials.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

UNTRAINED = (Status.DIVERGED.value, Status.STUCK.value)
"""How a model ended that no other trial starts from."""


class Store:
    """Finds what trials computed.

    Args:
        folder: of the trials' folders.
        records: of studies that were run before, perhaps elsewhere.
        threads: of each trial; None leaves it to the trial's settings.
    """

    def __init__(self, folder: Path, records: Records, threads: int | None = None):
        self.folder, self.records, self.threads = folder, records, threads
        self._ended: dict[str, Json] = {}
        self._complete: set[tuple[str, tuple[str, ...]]] = set()

    def task(self, trial: Trial) -> Task:
        """The trial as a process runs it."""
        places = {name: str((self.folder / source.key).absolute()) for name, source in trial.inputs.items()}
        changes: Json = {"output": str(self.folder / trial.key), **places}
        if self.threads is not None:
            changes["threads"] = self.threads
        settings = replace(trial.settings, **changes)
        return Task(settings=settings, job=trial.job, measures=trial.measures, identity=trial.identity)

    def result(self, trial: Trial) -> Json | None:
        """The result of a trial that has ended; None for any other."""
        if trial.key in self._ended:
            return self._ended[trial.key]
        result = read_result(self.folder / trial.key) if (self.folder / trial.key).is_dir() else None
        if result is None or result["status"] not in ENDED:  # not kept: the trial may run here for its model
            return self.records.rows.get(trial.key) or self._inherited(trial)
        self._ended[trial.key] = result
        return result

    def outcome(self, trial: Trial) -> Json | None:
        """How a trial's folder says that it ended, failed and interrupted included; None if there is none."""
        return read_result(self.folder / trial.key)

    def has_model(self, trial: Trial) -> bool:
        """Whether a trial's model is here for other trials to start from."""
        return (self.folder / trial.key / MODEL).is_dir()

    def _inherited(self, trial: Trial) -> Json | None:
        """The result of a trial whose model did not train: it has nothing to start from."""
        for source in trial.inputs.values():
            result = self.result(source)
            if result is not None and result["status"] in UNTRAINED:
                return {"status": str(result["status"]), "reason": f"it starts from a model that is {result['status']}"}
        return None

    def complete(self, trial: Trial) -> Json | None:
        """The result of a trial that has ended and has all its measures; None for any other."""
        result, place = self.result(trial), (trial.key, trial.measures)
        if result is None or not trial.measures or place in self._complete or self._inherited(trial) is not None:
            return result
        lacking = measures.missing(self.folder / trial.key, trial.measures)
        if any(self.records.table(trial.key, measure) is None for measure in lacking) and self._can_measure(result):
            return None
        self._complete.add(place)
        return result

    def table(self, key: str, measure: str) -> pd.DataFrame | None:
        """A measure's table of one trial; None if it has none."""
        table = measures.table(self.folder / key, measure)
        return table if table is not None else self.records.table(key, measure)

    def _can_measure(self, result: Json) -> bool:
        """Whether training again would give a model: not for a recorded trial that diverged."""
        return result["status"] != "diverged" or "key" not in result
