"""A trial of the store as its process gets it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.catalog import load
from lamina.jobs.files import read_yaml, write_json
from lamina.jobs.folder import lock
from lamina.jobs.names import CONFIG, RESULT
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED
from lamina.papers.trials.identity import SPELLED, key
from lamina.papers.trials.measures import measure
from lamina.studies.task import Busy, Task
from lamina.training.settings import PretrainSettings

IDENTITY = "trial.json"
_CLAIMS = ".claims"


@dataclass(frozen=True, kw_only=True)
class StoredTask(Task):
    """A trial of the store, which several drivers and studies may share.

    Attributes:
        measures: what is measured on the trial, as "TIME/NAME".
        identity: all that decides its numbers.
    """

    measures: tuple[str, ...] = ()
    identity: Json

    def to_request(self) -> Json:
        """Return the task as JSON."""
        return {**super().to_request(), "measures": list(self.measures), "identity": self.identity}

    @classmethod
    def from_request(cls, request: Json) -> StoredTask:
        """Return the task that JSON describes."""
        task = Task.from_request(request)
        stored = {"measures": tuple(request["measures"]), "identity": request["identity"]}
        return cls(settings=task.settings, job=task.job, trains=task.trains, **stored)

    def claim(self) -> AbstractContextManager[None]:
        """Hold the trial while it runs. Entering raises Busy if another driver runs it."""
        return _claimed(self.folder)

    def run(self) -> Json:
        """Run or resume the trial, then measure what it does not have yet; returns its result."""
        refuse_another(self.folder)
        settings = _as_stored(self.settings, self.folder)
        write_json(self.folder / IDENTITY, self.identity)
        result = load(self.job)(settings, resume="auto", bar=False)
        if self.measures and result["status"] in ENDED:
            measure(self.folder, cast(PretrainSettings, settings), self.measures)
        return result


def refuse_another(folder: Path) -> None:
    """Raise UserError if a folder of the store does not hold the trial whose key is its name: it may be a copy."""
    path = folder / IDENTITY
    if not path.is_file() and not (folder / RESULT).is_file():
        return  # it has not begun
    try:
        own = key(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"store: {str(path)!r} is not readable ({error}), so it is not known whose results the folder holds "
            "(allowed: the file as it was; without the folder, the trial is run again)"
        ) from None
    if own != folder.name:
        raise UserError(
            f"store: the folder {str(folder)!r} holds the trial {own}, as its {IDENTITY} says (allowed: each trial in "
            "the folder of its name; without the folder, the trial is run again)"
        )


def _as_stored(settings: Settings, folder: Path) -> Settings:
    """The settings with the words that the trial's folder has for them.

    The folder's name is the hash of what they mean, so these only differ in how they say it: a depth that is the
    backbone's own or given, another path of the same text.
    """
    path = folder / CONFIG
    stored = read_yaml(path) if path.is_file() else {}
    ours = settings.to_dict()
    changes = {name: stored[name] for name in SPELLED if name in stored and name in ours and stored[name] != ours[name]}
    return replace(settings, **changes) if changes else settings


class _claimed(AbstractContextManager[None]):
    def __init__(self, folder: Path):
        self._lock = lock(folder.parent / _CLAIMS / folder.name)

    def __enter__(self) -> None:
        try:
            self._lock.__enter__()
        except UserError as error:
            raise Busy(str(error)) from None

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)
