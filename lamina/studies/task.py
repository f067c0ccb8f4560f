"""Describe a training run, so that another process can execute it."""

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
    """Another process executes this run."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training run that a separate process executes."""

    settings: Settings  # the job's settings, with the run's folder as ``output``
    # the function that executes the run. The function must be at the top level of a module, because the process imports
    # the function by name
    job: Callable[..., Json] = pretrain
    trains: bool = True  # whether the job trains for ``settings.steps`` steps

    @property
    def folder(self) -> Path:
        return Path(self.settings.to_dict()["output"])

    @property
    def steps(self) -> int:
        """The number of steps that the run adds to a progress bar."""
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
        """Return a context manager that locks the run. Raises Busy if another process already executes the run."""
        return nullcontext()

    def run(self) -> Json:
        return self.job(self.settings, resume="auto", bar=False)


def _named(name: str) -> Any:
    module, _, qualname = name.partition(":")
    return reduce(getattr, qualname.split("."), import_module(module))


def task_of(request: Json) -> Task:
    """Build a task from a request, which names the task's class."""
    return _named(request["task"]).from_request(request)
