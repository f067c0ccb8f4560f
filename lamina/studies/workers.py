"""Trials in local worker processes: each in its own, so that a failed trial is a row and not a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping

from lamina.core.json_types import Json
from lamina.jobs.files import read_result, write_json
from lamina.jobs.names import RESULT
from lamina.jobs.signals import STOP_SIGNALS, handled
from lamina.studies import processes
from lamina.studies.processes import Process
from lamina.studies.task import Task
from lamina.studies.worker import BUSY, DISK_FULL

GRACE_SECONDS = 30.0
ROUND_SECONDS = 0.1  # between two looks at the running trials
BUSY_SECONDS = 2.0  # between two attempts at a trial that another driver runs


def run_trials(
    trials: Mapping[str, Task],
    *,
    workers: int,
    ended: Callable[[str, Json], None],
    tick: Callable[[list[str]], None],
) -> None:
    """Run every trial, ``workers`` at a time; ``ended`` gets each trial's id and result, ``tick`` the running ids.

    On KeyboardInterrupt the running trials save a checkpoint and end as `interrupted`; then the exception is raised
    again. A trial whose process dies gets a result with status `failed`.

    Raises:
        OSError: the disk is full; what was finished is kept.
    """
    waiting, running = list(trials), {}
    with _stop_signals() as stopped:
        try:
            processes.prepare()
            _run_all(trials, waiting, running, workers, ended, tick, stopped)
        except BaseException:
            _stop(running)
            with contextlib.suppress(OSError):
                _reap(running, trials, ended, missing="interrupted")
            raise


def _run_all(
    trials: Mapping[str, Task],
    waiting: list[str],
    running: dict[str, Process],
    workers: int,
    ended: Callable[[str, Json], None],
    tick: Callable[[list[str]], None],
    stopped: list[int],
) -> None:
    busy: dict[str, float] = {}  # when to try again
    while waiting or running or busy:
        if stopped:
            raise KeyboardInterrupt
        waiting += [trial for trial, due in busy.items() if due <= time.monotonic()]
        busy = {trial: due for trial, due in busy.items() if trial not in waiting}
        while waiting and len(running) < workers:
            trial = waiting.pop(0)
            running[trial] = processes.start(trials[trial])
        for trial in _reap(running, trials, ended):
            busy[trial] = time.monotonic() + BUSY_SECONDS
        tick(list(running))
        time.sleep(ROUND_SECONDS)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM: the first acts between two rounds, not during a write; a second acts at once."""
    stopped: list[int] = []

    def stop(number: int) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    with handled(STOP_SIGNALS, stop):
        yield stopped


def _reap(
    running: dict[str, Process],
    trials: Mapping[str, Task],
    ended: Callable[[str, Json], None],
    missing: str = "failed",
) -> list[str]:
    """Report the trials whose processes have ended; returns those that another driver runs."""
    busy = []
    for trial, process in list(running.items()):
        if (code := process.exit_code()) is None:
            continue
        del running[trial]
        folder = trials[trial].folder
        if code == BUSY:
            busy.append(trial)
            continue
        result = read_result(folder)
        if code == DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if result is None:
            result = {"status": missing, "reason": f"the worker process ended with exit code {code}"}
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / RESULT, result)
        ended(trial, result)
    return busy


def _stop(running: Mapping[str, Process]) -> None:
    for process in running.values():
        process.terminate()
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: kill at once
        _wait(running, GRACE_SECONDS)
    for process in running.values():
        if process.exit_code() is None:
            process.kill()
    _wait(running, GRACE_SECONDS)


def _wait(running: Mapping[str, Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.exit_code() is None for process in running.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
