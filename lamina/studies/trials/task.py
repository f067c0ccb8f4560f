"""A task: one trial as its process gets it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import read_yaml, write_json
from lamina.jobs.folder import lock
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED
from lamina.studies.trials.identity import SPELLED, key
from lamina.studies.trials.jobs import JOBS
from lamina.studies.trials.measures import measure
from lamina.training.settings import PretrainSettings

IDENTITY, CONFIG = "trial.json", "config.yaml"
_CLAIMS = ".claims"


class Busy(UserError):
    """Another process runs this trial of a shared store."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trial to run in a process of its own.

    Attributes:
        settings: of the job; their ``output`` is the trial's folder.
        job: a name in ``JOBS``.
        measures: what is measured on the trial, as "TIME/NAME".
        identity: all that decides its numbers; None for a trial that only one study has.
    """

    settings: Settings
    job: str = "pretrain"
    measures: tuple[str, ...] = ()
    identity: Json | None = None

    @property
    def folder(self) -> Path:
        """The trial's folder."""
        return Path(self.settings.to_dict()["output"])

    @property
    def steps(self) -> int:
        """What the trial counts for in a progress bar."""
        return max(1, int(getattr(self.settings, "steps", 1))) if JOBS[self.job].trains else 1

    def to_request(self) -> Json:
        """The task as JSON."""
        return {
            "job": self.job,
            "settings": self.settings.to_dict(),
            "measures": list(self.measures),
            "identity": self.identity,
        }

    @classmethod
    def from_request(cls, request: Json) -> Task:
        """The task from JSON."""
        record = JOBS[request["job"]].settings_class()
        return cls(
            job=request["job"],
            settings=record.from_dict(request["settings"]),
            measures=tuple(request["measures"]),
            identity=request["identity"],
        )

    def claim(self) -> AbstractContextManager[None]:
        """Hold the trial while it runs, if other drivers may run it, too. Entering raises Busy if one does."""
        return nullcontext() if self.identity is None else _claimed(self.folder)

    def run(self) -> Json:
        """Run or resume the trial, then measure what it does not have yet; returns its result."""
        settings = self.settings
        if self.identity is not None:
            refuse_another(self.folder)
            settings = _as_stored(settings, self.folder)
            write_json(self.folder / IDENTITY, self.identity)
        result = JOBS[self.job].function()(settings, resume="auto", bar=False)
        if self.measures and result["status"] in ENDED:
            measure(self.folder, cast(PretrainSettings, settings), self.measures)
        return result


def refuse_another(folder: Path) -> None:
    """Raise UserError if a folder of the store does not hold the trial whose key is its name.

    A copy or a restore may exchange two folders. What a trial's other files say is compared with the same ledger.
    """
    path = folder / IDENTITY
    words = digests.differs(path)
    if words is None and not path.is_file():
        return  # it has not begun, or the folder has no ledger
    own = ""
    try:
        if words is None:
            own = key(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        words = f"is not readable ({error})"
    if words is not None:
        raise UserError(
            f"store: {str(path)!r} {words}, so it is not known whose results the folder holds (allowed: the file as it "
            "was; without the folder, the trial is run again)"
        )
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
