"""The store of trials: each in a folder named by its key, for all studies; and the records of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_result
from lamina.jobs.manifest import what_is_missing
from lamina.jobs.model_folder import MODEL
from lamina.jobs.names import MANIFEST
from lamina.jobs.status import ENDED, Status
from lamina.papers.trials import measures
from lamina.papers.trials.jobs import JOBS
from lamina.papers.trials.records import Records
from lamina.papers.trials.task import StoredTask, refuse_another
from lamina.papers.trials.trial import Trial

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
        self._verified: set[str] = set()

    def place(self, key: str) -> Path:
        """A trial's folder. Raises UserError if it is there and holds another trial, or none that can be told."""
        folder = self.folder / key
        if key not in self._verified and folder.is_dir():
            refuse_another(folder)
            self._verified.add(key)
        return folder

    def task(self, trial: Trial) -> StoredTask:
        """The trial as a process runs it."""
        places = {name: str((self.folder / source.key).absolute()) for name, source in trial.inputs.items()}
        changes: Json = {"output": str(self.folder / trial.key), **places}
        if self.threads is not None:
            changes["threads"] = self.threads
        settings = replace(trial.settings, **changes)
        job = JOBS[trial.job]
        return StoredTask(
            settings=settings, job=job.run, trains=job.trains, measures=trial.measures, identity=trial.identity
        )

    def result(self, trial: Trial) -> Json | None:
        """The result of a trial that has ended; None for any other."""
        if trial.key in self._ended:
            return self._ended[trial.key]
        result = self.outcome(trial)
        if result is None or result["status"] not in ENDED:  # not kept: the trial may run here for its model
            return self.records.row(trial) or self._inherited(trial)
        self._ended[trial.key] = result
        return result

    def outcome(self, trial: Trial) -> Json | None:
        """How a trial's folder says that it ended, failed and interrupted included; None if there is none."""
        folder = self.place(trial.key)
        return read_result(folder) if folder.is_dir() else None

    def has_model(self, trial: Trial) -> bool:
        """Whether a trial's model is here for other trials to start from. Raises UserError if it is cut short."""
        model = self.place(trial.key) / MODEL
        if (model / MANIFEST).is_file() and (broken := what_is_missing(model)) is not None:
            raise UserError(
                f"store: {str(model)!r}: {broken}, and other trials start from it (allowed: the files as they were "
                "written; without the trial's folder, it is trained again)"
            )
        return model.is_dir()

    def damage(self, trials: Iterable[Trial]) -> list[str]:
        """Return a line for each model and checkpoint of an ended trial that lacks a file or has a cut one."""
        lines = []
        for key in dict.fromkeys(trial.key for trial in trials if self.result(trial) and trial.key in self._ended):
            folder = self.folder / key
            for sealed in (folder / MODEL, *sorted(folder.glob("checkpoints/checkpoint-*"))):
                if (sealed / MANIFEST).is_file() and (broken := what_is_missing(sealed)) is not None:
                    lines.append(f"{sealed.relative_to(self.folder)}: {broken}")
        return lines

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
        lacking = measures.missing(self.place(trial.key), trial.measures)
        if any(self.records.table(trial.key, measure) is None for measure in lacking) and self._can_measure(result):
            return None
        self._complete.add(place)
        return result

    def table(self, key: str, measure: str) -> pd.DataFrame | None:
        """A measure's table of one trial; None if it has none, or one that is not as it was written."""
        table = measures.table(self.place(key), measure)
        return table if table is not None else self.records.table(key, measure)

    def _can_measure(self, result: Json) -> bool:
        """Whether training again would give a model: not for a recorded trial that diverged."""
        return result["status"] != "diverged" or "key" not in result
