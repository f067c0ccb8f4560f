"""Runs tasks with a progress bar, whatever they are run on: every study's trials pass here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from lamina.core.json_types import Json
from lamina.studies.progress import Progress
from lamina.studies.task import Task
from lamina.studies.workers import run_trials

Ended: TypeAlias = Callable[[str, Json], None]
"""Gets a trial's name and its result."""


class Executor(Protocol):
    """Runs tasks, several at a time."""

    def __call__(
        self, trials: Mapping[str, Task], *, workers: int, ended: Ended, tick: Callable[[list[str]], None]
    ) -> None:
        """Run every task; ``ended`` gets each one's name and result, ``tick`` the names of those that run."""
        ...


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(
    tasks: Mapping[str, Task],
    *,
    done: int,
    waiting: int = 0,
    workers: int | None,
    bar: bool,
    ended: Ended,
    execute: Executor = run_trials,
) -> None:
    """Run every task; ``ended`` gets each one's name and result, as soon as it has one.

    Args:
        tasks: by name.
        done: how many more trials the study has that need not run, for the bar.
        waiting: how many more wait for these, for the bar.
        workers: how many run at a time; None for one per core.
        bar: whether to show progress.
        ended: called after each task.
        execute: what runs them.

    Raises:
        OSError: the disk is full; what was finished is kept.
        KeyboardInterrupt: after the running trials have ended as `interrupted`.
    """
    progress = Progress(tasks, done=done, waiting=waiting, show=bar)

    def one_ended(name: str, result: Json) -> None:
        progress.ended(name, result)
        ended(name, result)

    try:
        execute(tasks, workers=max(1, min(workers or cores(), len(tasks))), ended=one_ended, tick=progress.tick)
    finally:
        progress.close()
