"""Write and verify checkpoints.

Lamina writes a checkpoint under a temporary name, hashes it, syncs it to disk and renames it. A checkpoint is therefore
always complete.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from lamina.core.json_types import Json, RunState
from lamina.jobs import manifest
from lamina.jobs.files import read_json
from lamina.jobs.folder import drop_old
from lamina.jobs.manifest import (
    NOT_A_MANIFEST,
    Entry,
    files_in,
    listed,
    seal,
    sha256,
    strays,
    sync,
    sync_and_hash,
)
from lamina.modeling.processes import Processes

logger = logging.getLogger(__name__)

RUN_STATE = "run_state.json"


class Stateful(Protocol):
    """An object with a state that checkpoints store. ``TrainingRun.states`` lists all such objects."""

    def state_dict(self) -> Json:
        """Return this object's state as JSON values. No two objects of a run may use the same key."""
        ...

    def load_state_dict(self, state: RunState) -> None:
        """Restore this object from a checkpoint's run state, which has the states of all objects and the step."""
        ...


def collected(states: Iterable[Stateful]) -> Json:
    return {name: value for stateful in states for name, value in stateful.state_dict().items()}


class Checkpoints:
    """The checkpoints of a run, in the folder "checkpoints" of the run's folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def paths(self) -> list[Path]:
        """Return the paths of all checkpoints, by step. Raises OSError if the folder is unreadable."""
        children = self.folder.iterdir() if self.folder.is_dir() else ()  # glob finds nothing in an unreadable folder
        return sorted((p for p in children if re.fullmatch(r"checkpoint-(0|[1-9]\d*)", p.name)), key=step_of)

    def newest(self, allowed: Callable[[Json], bool] = lambda state: True) -> Path | None:
        """Return the newest intact checkpoint with a run state that passes the test ``allowed``. Warn about broken
        checkpoints.
        """
        for path in reversed(self.paths()):
            broken = what_is_broken(path)
            if broken is not None:
                logger.warning("%s: %s. Lamina resumes from the previous checkpoint", path, broken)
            elif allowed(run_state(path)):
                if stray_files := strays(path):
                    logger.warning(
                        "%s contains files that Lamina did not write. Lamina ignores these files: %s",
                        path,
                        ", ".join(stray_files[:3]),
                    )
                return path
        return None

    @contextmanager
    def save(self, step: int, processes: Processes) -> Iterator[Path]:
        """Yield a folder in which every process writes its part of a new checkpoint, then hash, sync and publish the
        files.
        """
        path, final = self.folder / f".draft-{step}", self.folder / f"checkpoint-{step}"

        def begin() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for rest in [*self.folder.glob(".draft-*"), *self.folder.glob(".gone-*")]:  # left by a killed run
                shutil.rmtree(rest)
            path.mkdir()

        def visible() -> None:
            if not path.is_dir():
                raise FileNotFoundError(2, "the output folder is not on a disk that all hosts share", str(path))

        processes.by_first(begin)
        processes.together(visible)
        try:
            yield path
            names = files_in(path)[processes.rank :: processes.size]
            mine = processes.together(lambda: {name: sync_and_hash(path / name) for name in names})
            entries = {name: entry for part in processes.everyones(mine) for name, entry in part.items()}
            processes.by_first(lambda: _publish(path, final, entries))
        except BaseException:
            if processes.first:
                shutil.rmtree(path, ignore_errors=True)  # a full disk needs the space
            raise

    def prune(self, step: int, keep: int, keep_also: Callable[[Json], bool] | None = None) -> None:
        """Delete old checkpoints, and all checkpoints from steps after the current step.

        Lamina keeps the newest ``keep`` checkpoints, and the newest checkpoint whose run state passes the test
        ``keep_also``. Lamina also keeps checkpoints with a wrong step in their name, because their content may exist
        nowhere else.
        """
        named_right = [path for path in self.paths() if _of_its_step(path)]
        retained = [p for p in named_right if step_of(p) <= step][-keep:]
        if keep_also is not None:
            retained += [p for p in reversed(named_right) if step_of(p) <= step and _accepts(keep_also, p)][:1]
        for path in named_right:
            if path not in retained:
                _discard(path)
        drop_old(self.folder.parent)

    def discard_after(self, step: int) -> None:
        for path in self.paths():
            if step_of(path) > step:
                _discard(path)


class Background:
    """Write one checkpoint at a time in a thread with a separate process group, while training continues."""

    def __init__(self, processes: Processes):
        self._training, self.processes = processes, processes.apart()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None

    def begin(self, act: Callable[[], None]) -> None:
        """Call a function in the thread. Call ``wait`` before the next call."""
        self._written = self._thread.submit(act)

    def look(self) -> None:
        """Raise a failed thread's error when the threads of all processes have ended. Call this in all processes."""
        if self._written is not None and not self._training.anyone(not self._written.done()):
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. All processes raise the error of a failed thread."""
        written, self._written = self._written, None
        if written is not None:
            written.result()


def step_of(path: Path) -> int:
    return int(path.name.split("-")[-1])


def run_state(path: Path) -> Json:
    """Read an intact checkpoint's run state, which contains no tensors."""
    return read_json(path / RUN_STATE)


def listed_state(path: Path) -> Json | None:
    """Return a checkpoint's run state, or None if run_state.json is damaged. This function checks no other file."""
    try:
        state = run_state(path) if listed(path)[RUN_STATE][1] == sha256(path / RUN_STATE) else None
        return state if state is not None and state["step"] == step_of(path) else None
    except (OSError, *NOT_A_MANIFEST):
        return None


def what_is_broken(path: Path) -> str | None:
    """Describe the first fault in a checkpoint's files, or in the step of its name. Return None without a fault."""
    broken = manifest.what_is_broken(path)
    if broken is None and (step := run_state(path)["step"]) != step_of(path):
        return f"Lamina saved this checkpoint at step {step}, so the checkpoint's name is wrong"
    return broken


def _discard(path: Path) -> None:
    """Rename and then delete a checkpoint, so that a killed process leaves no incomplete checkpoint behind."""
    doomed = path.with_name(f".gone-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _accepts(keep_also: Callable[[Json], bool], path: Path) -> bool:
    try:
        return keep_also(run_state(path))
    except (OSError, ValueError):
        return False


def _publish(path: Path, final: Path, entries: dict[str, Entry]) -> None:
    seal(path, entries)
    if final.exists():  # broken, or abandoned by a rollback, because the run would resume from an intact checkpoint
        _discard(final)
    os.replace(path, final)
    sync(final.parent)


def _of_its_step(path: Path) -> bool:
    """Return whether a checkpoint's name has the right step. Return True if the run state is unreadable."""
    try:
        return run_state(path)["step"] == step_of(path)
    except (OSError, *NOT_A_MANIFEST):
        return True
