"""Trials in local worker processes: each its own process, so that one that fails is a row and not a crash."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.training import folder as run_folder
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

DISK_FULL = 74  # EX_IOERR of sysexits.h
GRACE_SECONDS = 30.0


def run_trials(
    trials: Mapping[str, PretrainSettings],
    *,
    workers: int,
    ended: Callable[[str, dict[str, Any]], None],
    tick: Callable[[list[str]], None],
) -> None:
    """Run every trial, ``workers`` at a time; ``ended`` gets each one's id and result, ``tick`` the running ids.

    On KeyboardInterrupt the running trials are told to stop, save a checkpoint and end as `interrupted`; then it is
    raised again. A trial whose process dies leaves a result with status `failed`.

    Raises:
        OSError: the disk is full; what was finished is kept.
    """
    # Forking a server that has imported torch is safe on Linux only.
    context = multiprocessing.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        # The server imports torch and transformers once; each trial is forked from it in milliseconds.
        context.set_forkserver_preload(["lamina.training.pretrain"])
    waiting, running = list(trials), {}
    with _stop_signals() as stopped:
        try:
            if context.get_start_method() == "forkserver":
                _start_server()
            _run_all(context, trials, waiting, running, workers, ended, tick, stopped)
        except BaseException:
            _stop(running)
            with contextlib.suppress(OSError):
                _reap(running, trials, ended, missing="interrupted")
            raise


def _run_all(
    context: Any,
    trials: Mapping[str, PretrainSettings],
    waiting: list[str],
    running: dict[str, BaseProcess],
    workers: int,
    ended: Callable[[str, dict[str, Any]], None],
    tick: Callable[[list[str]], None],
    stopped: list[int],
) -> None:
    while waiting or running:
        if stopped:
            raise KeyboardInterrupt
        while waiting and len(running) < workers:
            trial = waiting.pop(0)
            running[trial] = _start(context, trials[trial])
        _reap(running, trials, ended)
        tick(list(running))
        time.sleep(0.2)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM: they act between two rounds, not in the middle of a write; a second acts at once."""
    stopped: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    old: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs us handles signals
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _start_server() -> None:
    """Start the server that trials are forked from, deaf to Ctrl-C: it would die of one in its imports."""
    from multiprocessing import forkserver

    old: Any = None
    with contextlib.suppress(ValueError):  # not the main thread
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a new process inherits it
    try:
        forkserver.ensure_running()
    finally:
        if old is not None:
            signal.signal(signal.SIGINT, old)


def _start(context: Any, settings: PretrainSettings) -> BaseProcess:
    process = context.Process(target=_run_trial, args=(settings.to_dict(),))
    process.start()
    return process


def _reap(
    running: dict[str, BaseProcess],
    trials: Mapping[str, PretrainSettings],
    ended: Callable[[str, dict[str, Any]], None],
    missing: str = "failed",
) -> None:
    for trial, process in list(running.items()):
        if process.is_alive():
            continue
        process.join()
        del running[trial]
        folder = Path(trials[trial].output)
        result = run_folder.read_result(folder)
        if process.exitcode == DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if result is None:
            result = {"status": missing, "reason": f"the worker process ended with exit code {process.exitcode}"}
            folder.mkdir(parents=True, exist_ok=True)
            run_folder.write_json(folder / "result.json", result)
        ended(trial, result)


def _stop(running: Mapping[str, BaseProcess]) -> None:
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for process in running.values():
            process.join(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:  # asked twice: at once, then
        pass
    for process in running.values():
        if process.is_alive():
            process.kill()
            process.join()


def _run_trial(data: dict[str, Any]) -> None:
    """The body of a worker process: one run, whatever it prints kept in its folder's log.txt."""
    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C at the terminal reaches the study, which tells its trials once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    settings = PretrainSettings.from_dict(data)
    folder = Path(settings.output)
    try:
        from lamina.training.pretrain import pretrain

        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "environment.json").is_file():  # marks the folder as ours before the log is in it
            run_folder.write_json(folder / "environment.json", run_folder.environment(settings.seed))
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
            pretrain(settings, resume="auto", bar=False)
    except KeyboardInterrupt:
        run_folder.write_json(folder / "result.json", {"status": "interrupted", "reason": "stopped before it started"})
    except Exception as error:
        if run_folder.disk_full(error):
            sys.exit(DISK_FULL)
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        run_folder.write_json(folder / "result.json", {"status": "failed", "reason": reason})
        raise
