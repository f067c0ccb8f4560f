"""A task: one trial as its process gets it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.catalog import load
from lamina.jobs.settings import Settings


class Busy(UserError):
    """Another process runs this trial."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trial to run in its own process.

    Attributes:
        settings: of the job; their ``output`` is the trial's folder.
        job: "module:function" that runs a trial; it takes the settings, ``resume`` and ``bar``, and returns the result.
        trains: whether the steps of the settings are trained.
    """

    settings: Settings
    job: str = "lamina.training.pretrain:pretrain"
    trains: bool = True

    @property
    def folder(self) -> Path:
        """The trial's folder."""
        return Path(self.settings.to_dict()["output"])

    @property
    def steps(self) -> int:
        """The number of steps that the trial adds to a progress bar."""
        return max(1, int(getattr(self.settings, "steps", 1))) if self.trains else 1

    def to_request(self) -> Json:
        classes = {"task": type(self), "record": type(self.settings)}
        named = {name: f"{each.__module__}:{each.__qualname__}" for name, each in classes.items()}
        return {**named, "settings": self.settings.to_dict(), "job": self.job, "trains": self.trains}

    @classmethod
    def from_request(cls, request: Json) -> Self:
        return cls(
            settings=load(request["record"]).from_dict(request["settings"]),
            job=request["job"],
            trains=request["trains"],
        )

    def claim(self) -> AbstractContextManager[None]:
        """Hold the trial while it runs, if other drivers may run it. Entering raises Busy if one does."""
        return nullcontext()

    def run(self) -> Json:
        """Run or resume the trial; returns its result."""
        return load(self.job)(self.settings, resume="auto", bar=False)


def task_of(request: Json) -> Task:
    """Rebuild a task from a request, with the class that wrote it."""
    return load(request["task"]).from_request(request)
