"""Execute training runs in separate processes, with a progress bar. A failed run does not stop the study."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias

from tqdm.auto import tqdm

from lamina.core.json_types import Json
from lamina.core.progress import ProgressLines, has_bars
from lamina.errors import printable
from lamina.jobs.environment import cores, gpu_names
from lamina.jobs.files import full_disk, read_result
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.seals import write_result
from lamina.jobs.signals import STOP_SIGNALS, handled
from lamina.studies import processes
from lamina.studies.processes import Process
from lamina.studies.task import Task
from lamina.studies.worker import BUSY, DISK_FULL


class Progress:
    """Show the progress of all runs as a bar, or as a line every 30 seconds. Print a line for each finished run."""

    def __init__(self, trials: Mapping[str, Task], *, done: int, waiting: int = 0, show: bool):
        self.trials, self.show = trials, show
        self.steps, self.ended_here = dict.fromkeys(trials, 0), 0
        total = sum(s.steps for s in trials.values())
        self.bar = tqdm(total=total, unit="step", disable=not (show and has_bars()), dynamic_ncols=True)
        self.lines = ProgressLines(total, show=show and not has_bars(), every=30.0)
        self.count, self.all = done, done + len(trials) + waiting
        self.bar.set_description(f"{self.count}/{self.all} trials")

    def tick(self, running: list[str]) -> None:
        for trial in running:
            self._advance(trial, RunFolder(self.trials[trial].folder).last_step())
        if running:  # ``ended`` prints the last line
            self._write_line()

    def ended(self, trial: str, result: Json) -> None:
        if goes_on := result["status"] == "interrupted":
            self._advance(trial, RunFolder(self.trials[trial].folder).last_step())
        else:
            self._advance(trial, self.trials[trial].steps)
            self.count, self.ended_here = self.count + 1, self.ended_here + 1
        self.bar.set_description(f"{self.count}/{self.all} trials")
        if goes_on:  # the command's last line tells that the study was interrupted
            return
        if self.show:
            loss = result.get("eval_loss")
            text = f"eval loss {loss:.3f}" if loss is not None else result.get("reason", "")
            self.bar.write(printable(f"{result['status']:>11}  {trial}  {text}"))
        self._write_line()

    def close(self) -> None:
        self.bar.close()

    def _write_line(self) -> None:
        steps = sum(self.steps.values())
        if steps and (steps < self.lines.total or self.ended_here == len(self.trials)):
            self.lines.see(steps, {"trials done": f"{self.count}/{self.all}"})

    def _advance(self, trial: str, step: int) -> None:
        self.bar.update(max(0, step - self.steps[trial]))
        self.steps[trial] = max(step, self.steps[trial])


GRACE_SECONDS = 30.0
ROUND_SECONDS = 0.1  # between two checks of the current runs
BUSY_SECONDS = 2.0  # between two attempts at a run that another process executes


Ended: TypeAlias = Callable[[str, Json], None]
"""A function that Lamina calls with a run's name and result."""


def run_trials(trials: Mapping[str, Task], *, workers: int, ended: Ended, tick: Callable[[list[str]], None]) -> None:
    """Execute runs in separate processes, several at a time. Each run uses the GPU with the fewest runs.

    If a run's process dies, the run's result has the status `failed`. At KeyboardInterrupt, the current runs save a
    checkpoint and end as `interrupted`.

    Args:
        workers: the number of simultaneous runs.
        ended: a function that Lamina calls with the name and result of each finished run.
        tick: a function that Lamina calls repeatedly with the names of the current runs.

    Raises:
        OSError: the disk is full. Lamina keeps the finished runs.
    """
    waiting, running = list(trials), dict[str, Process]()
    devices, uses = gpus(), dict[str, str]()
    busy: dict[str, float] = {}  # the time of the next attempt

    def wait() -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.exit_code() is None for process in running.values()) and time.monotonic() < deadline:
            time.sleep(0.05)

    with _stop_signals() as stopped:
        try:
            processes.prepare()
            while waiting or running or busy:
                if stopped:
                    raise KeyboardInterrupt
                waiting += [trial for trial, due in busy.items() if due <= time.monotonic()]
                busy = {trial: due for trial, due in busy.items() if trial not in waiting}
                while waiting and len(running) < workers:
                    trial = waiting.pop(0)
                    seen = {}
                    if devices:
                        uses[trial] = min(devices, key=Counter(uses[worker] for worker in running).__getitem__)
                        seen = {"CUDA_VISIBLE_DEVICES": uses[trial]}
                    running[trial] = processes.start(trials[trial], seen)
                for trial in _reap(running, trials, ended):
                    busy[trial] = time.monotonic() + BUSY_SECONDS
                tick(list(running))
                time.sleep(ROUND_SECONDS)
        except BaseException:
            for process in running.values():
                process.terminate()
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: kill at once
                wait()
            for process in running.values():
                if process.exit_code() is None:
                    process.kill()
            wait()
            with contextlib.suppress(OSError):
                _reap(running, trials, ended, missing="interrupted")
            raise


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """At the first Ctrl-C or SIGTERM, stop when the current checks are done. At the second signal, stop at once."""
    stopped: list[int] = []

    def stop(number: int) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    with handled(STOP_SIGNALS, stop):
        yield stopped


def _reap(running: dict[str, Process], trials: Mapping[str, Task], ended: Ended, missing: str = "failed") -> list[str]:
    """Report the runs that have ended with their process. Return the runs that another process is already executing."""
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
            raise full_disk(folder)
        if result is None:
            result = {"status": missing, "reason": f"the worker process ended with exit code {code}"}
            folder.mkdir(parents=True, exist_ok=True)
            write_result(folder, result)
        ended(trial, result)
    return busy


class Executor(Protocol):
    """A function that executes runs, with the arguments of ``run_trials``."""

    def __call__(
        self, trials: Mapping[str, Task], *, workers: int, ended: Ended, tick: Callable[[list[str]], None]
    ) -> None: ...


def gpus() -> list[str]:
    """Return the names of the usable GPUs, as in CUDA_VISIBLE_DEVICES, without starting CUDA."""
    import torch

    if not torch.backends.cuda.is_built():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(gpu_names())]


def usual_workers(device: str = "auto") -> int:
    """Return the default number of simultaneous runs: one per GPU, or one per CPU core if there is no GPU."""
    return (0 if device == "cpu" else len(gpus())) or cores()


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
    """Execute runs with a progress bar.

    Args:
        done: number of runs that had finished before, for the progress bar.
        waiting: number of runs that will start later, for the progress bar.
        workers: number of simultaneous runs (default: ``usual_workers``).
        ended: a function that Lamina calls with the name and result of each finished run.

    Raises:
        OSError: the disk is full. Lamina keeps the finished runs.
        KeyboardInterrupt: Lamina first ends the current runs as `interrupted`.
    """
    progress = Progress(tasks, done=done, waiting=waiting, show=bar)

    def one_ended(name: str, result: Json) -> None:
        progress.ended(name, result)
        ended(name, result)

    try:
        devices = {getattr(task.settings, "device", "auto") for task in tasks.values()}
        most = workers or usual_workers("cpu" if devices == {"cpu"} else "auto")
        execute(tasks, workers=max(1, min(most, len(tasks))), ended=one_ended, tick=progress.tick)
    finally:
        progress.close()
