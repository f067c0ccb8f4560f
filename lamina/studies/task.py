"""Describe a trial, so that another process can run it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.settings import Settings
from lamina.training.pretrain_row import pretrain


class Busy(UserError):
    """Another process runs this trial."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trial that runs in a separate process.

    Attributes:
        settings: the job's settings. Their ``output`` is the trial's folder.
        job: a function that runs a trial. The function takes the settings, ``resume`` and ``bar``, and returns the
            result. Define the function at the top level of a module, because the trial's process imports the function
            by name.
        trains: whether the job trains for ``settings.steps`` steps.
    """

    settings: Settings
    job: Callable[..., Json] = pretrain
    trains: bool = True

    @property
    def folder(self) -> Path:
        """The trial's folder."""
        return Path(self.settings.to_dict()["output"])

    @property
    def steps(self) -> int:
        """Return the number of steps that the trial adds to a progress bar."""
        return max(1, int(getattr(self.settings, "steps", 1))) if self.trains else 1

    def to_request(self) -> Json:
        named = {"task": type(self), "record": type(self.settings), "job": self.job}
        names = {key: f"{each.__module__}:{each.__qualname__}" for key, each in named.items()}
        return {**names, "settings": self.settings.to_dict(), "trains": self.trains}

    @classmethod
    def from_request(cls, request: Json) -> Self:
        return cls(
            settings=_named(request["record"]).from_dict(request["settings"]),
            job=_named(request["job"]),
            trains=request["trains"],
        )

    def claim(self) -> AbstractContextManager[None]:
        """Return a context that locks the trial, if several processes may run it. Raises Busy if another process runs
        the trial.
        """
        return nullcontext()

    def run(self) -> Json:
        """Run or resume the trial, and return its result."""
        return self.job(self.settings, resume="auto", bar=False)


def _named(name: str) -> Any:
    """Import and return the object with the name "module:name"."""
    module, _, qualname = name.partition(":")
    return reduce(getattr, qualname.split("."), import_module(module))


def task_of(request: Json) -> Task:
    """Build a task from the driver's request. The request names the task's class."""
    return _named(request["task"]).from_request(request)
