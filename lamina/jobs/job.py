"""A job and its folder. ``with open_job(...) as job`` locks the folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from lamina.core.values import text
from lamina.errors import UserError, unknown
from lamina.jobs.environment import environment
from lamina.jobs.files import noted, write_json, write_sealed, write_text
from lamina.jobs.folder import Resume, hold, in_use, nothing_to_resume, refuse
from lamina.jobs.names import CONFIG, ENVIRONMENT
from lamina.jobs.seals import lift_seal, seal_tables
from lamina.jobs.settings import Settings

S = TypeVar("S", bound=Settings)
Stored = Callable[[Path], Mapping[str, Any] | None]
"""A function that reads the settings in a folder, or returns None if the folder holds none."""


@dataclass(frozen=True, kw_only=True)
class ResumePolicy:
    """The settings that the user may change when a job resumes."""

    what: str  # the noun for the job in messages, such as "run" or "study"
    free: frozenset[str]  # the settings that may change
    # the settings with paths. A path may change if the new files have the same content
    compared: frozenset[str] = frozenset()

    def merge(
        self, stored: Mapping[str, object], given: Mapping[str, object], defaults: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the folder's settings (``stored``) with the user's changes (``given``).

        If a setting may not change, ``auto`` means the stored value, and any other new value raises UserError.
        ``defaults`` has the values of settings that the folder does not store.
        """
        given = {name: value for name, value in given.items() if value != "auto" or name in self.free}
        for name, value in given.items():
            old = stored.get(name, defaults.get(name))
            if name not in self.free and name not in self.compared and value != old:
                changeable = ", ".join(sorted(set(self.free) - {"output"}))
                raise UserError(
                    f"{name}: {value!r} differs from the {self.what}'s {old!r}. With --resume, you may change only "
                    f"{changeable}. Give the old value, or choose another --output."
                )
        return {**stored, **given}


class Job(Generic[S]):
    """A job's settings and folder. ``open_job`` creates a Job, and a ``with`` block locks the folder.

    Attributes:
        settings: all settings. A resumed job has the stored settings with the user's changes.
        given: the settings that the user gave, or None if the caller gave a complete settings object.
        resumes: whether the folder holds a job to resume.
    """

    def __init__(
        self, kind: str, settings: S, given: Mapping[str, Any] | None, folder: Path, resume: Resume, **how: Any
    ):
        self.kind, self.settings, self.given, self.folder = kind, settings, given, folder
        self.resumes = bool(resume) and in_use(folder)
        self._hold = partial(hold, folder, resume=resume, **how)

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self.resumes = held.enter_context(self._hold())
            self._as_sealed = lift_seal(self.folder)
            seed = getattr(self.settings, "seed", 0)
            about = environment(seed, self.kind)
            if self.resumes and (first := noted(self.folder / ENVIRONMENT).get("command")):
                about["command"] = first  # the command that made the folder, not `--resume`
            write_json(self.folder / ENVIRONMENT, about)  # marks the folder as ours
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if error is None or self._as_sealed:  # otherwise, an altered table may still be in the failed job's folder
                with suppress(*([OSError] if error else [])):
                    seal_tables(self.folder)
        finally:
            self._held.__exit__(kind, error, traceback)

    def write_json(self, name: str, data: object) -> None:
        write_json(self.folder / name, data)

    def write_text(self, name: str, text: str) -> None:
        write_text(self.folder / name, text)

    def write_config(self, data: Mapping[str, Any]) -> None:
        write_sealed(self.folder / CONFIG, data)


def open_job(
    kind: str,
    settings: type[S],
    given: S | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    policy: ResumePolicy | None = None,
    stored: Stored | None = None,
    wait: float = 0.0,
) -> Job[S]:
    """Check a job's settings and folder. Lamina changes the folder only when the ``with`` block begins.

    Args:
        given: a complete settings object, or a mapping with only the settings that the user gave.
        resume: whether to resume the job in the folder. "auto" resumes if the folder holds a job.
        policy: the settings that a resumed job may change.
        stored: a function that reads the settings of the job to resume.
        wait: the seconds to wait for another process that has locked the folder.

    Raises:
        UserError: a setting is invalid or may not change, the output folder holds files, or there is nothing to resume.
    """
    by_name = given.to_dict() if isinstance(given, Settings) else given
    defaults = {name: settings.default(name) for name in settings.names()}
    folder = Path(text("output", by_name.get("output", defaults["output"])))
    refuse(folder, resume=resume, overwrite=overwrite, resumes=stored is not None)
    earlier = stored(folder) if policy is not None and stored is not None and resume and in_use(folder) else None
    if policy is not None and earlier is not None:
        if edited := earlier.keys() - defaults.keys():
            raise UserError(f"{str(folder)!r}: {unknown('setting', min(edited), defaults)}")
        record = settings.from_dict(policy.merge(earlier, by_name, defaults))
    elif stored is not None and resume is True:
        raise nothing_to_resume(folder)
    else:
        record = given if isinstance(given, Settings) else settings.from_dict(given)
    named = None if isinstance(given, Settings) else given
    return Job(kind, record, named, folder, resume, overwrite=overwrite, wait=wait)
