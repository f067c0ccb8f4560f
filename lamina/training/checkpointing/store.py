"""Checkpoints that are whole or not there: drafts with checksums, renamed when they are on disk, verified when read."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamina.jobs import manifest, replaced
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
from lamina.training.execution.processes import Processes

logger = logging.getLogger(__name__)

RUN_STATE = "run_state.json"


def newest_checkpoint(folder: Path, admitted: Callable[[dict[str, Any]], bool] = lambda state: True) -> Path | None:
    """The newest whole checkpoint whose run state is ``admitted``; the log names those that are not whole.

    It also names files in the one found that its manifest does not list: they are not read.
    """
    for path in reversed(checkpoints(folder)):
        broken = what_is_broken(path)
        if broken is not None:
            logger.warning("%s: %s; going on from the one before", path, broken)
        elif admitted(run_state(path)):
            if others := strays(path):
                logger.warning("%s: not one of its files, so not read: %s", path, ", ".join(others[:3]))
            return path
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, by step. Raises OSError for a folder that can't be read."""
    there = folder.iterdir() if folder.is_dir() else ()  # glob would find nothing where reading is not allowed
    return sorted((p for p in there if re.fullmatch(r"checkpoint-(0|[1-9]\d*)", p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint was taken at."""
    return int(path.name.split("-")[-1])


def run_state(path: Path) -> dict[str, Any]:
    """What a whole checkpoint says of the run beyond its tensors: the guard, what was logged, the rollbacks so far."""
    return json.loads((path / RUN_STATE).read_text(encoding="utf-8"))


def listed_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint's run state if that file is as its manifest lists it, whatever became of the others; else None."""
    try:
        state = run_state(path) if listed(path)[RUN_STATE][1] == sha256(path / RUN_STATE) else None
        return state if state is not None and state["step"] == step_of(path) else None
    except (OSError, *NOT_A_MANIFEST):
        return None


def what_is_broken(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file: missing, cut short or altered. None where it is whole.

    One whose folder has another step's name is not whole.
    """
    broken = manifest.what_is_broken(path)
    if broken is None and (step := run_state(path)["step"]) != step_of(path):
        return f"it was taken at step {step}, so it is not what its name says"
    return broken


@contextmanager
def draft(folder: Path, step: int, processes: Processes) -> Iterator[Path]:
    """A folder to write a checkpoint into; at the end it becomes checkpoint-STEP, or is gone where writing failed.

    Every process writes its part. The files' checksums are taken, all is brought to the disk, and only then does the
    checkpoint get its name. An error in one process is raised in all.
    """
    path, final = folder / f".draft-{step}", folder / f"checkpoint-{step}"

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)
        path.mkdir()

    processes.by_first(begin)
    processes.together(lambda: _seen(path))
    try:
        yield path
        files = files_in(path)
        mine = processes.together(lambda: {f: sync_and_hash(path / f) for f in files[processes.rank :: processes.size]})
        entries = {name: entry for part in processes.everyones(mine) for name, entry in part.items()}
        processes.by_first(lambda: _publish(path, final, entries))
    except BaseException:
        if processes.first:
            shutil.rmtree(path, ignore_errors=True)  # a full disk needs the room
        raise


def prune(folder: Path, step: int, keep: int, spared: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Once checkpoint-STEP is whole, leave ``keep`` up to it, and none after it: those are of a line given up.

    ``spared``: the newest one whose run state it accepts stays, too. So does one with another step's name: it is none
    of this line's, and perhaps the only copy of what it holds.
    """
    found = [path for path in checkpoints(folder) if _of_its_step(path)]
    kept = [p for p in found if step_of(p) <= step][-keep:]
    if spared is not None:
        kept += [p for p in reversed(found) if step_of(p) <= step and _accepts(spared, p)][:1]
    for path in found:
        if path not in kept:
            discard(path)
    replaced.drop(folder.parent)  # what --overwrite keeps until there is a first checkpoint


def discard(path: Path) -> None:
    """Delete a checkpoint; a kill meanwhile leaves no torn one behind."""
    going = path.with_name(f".gone-{path.name}")
    shutil.rmtree(going, ignore_errors=True)
    os.replace(path, going)
    shutil.rmtree(going, ignore_errors=True)


def clear(folder: Path) -> None:
    """Delete what a killed run left half written or half deleted."""
    for path in [*folder.glob(".draft-*"), *folder.glob(".gone-*")]:
        shutil.rmtree(path)


def _accepts(spared: Callable[[dict[str, Any]], bool], path: Path) -> bool:
    try:
        return spared(run_state(path))
    except (OSError, ValueError):
        return False


def _seen(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(2, "the output folder is not on a disk that all hosts share", str(path))


def _publish(path: Path, final: Path, entries: dict[str, Entry]) -> None:
    seal(path, entries)
    if final.exists():  # broken, or of a line that was given up: a whole one would have been resumed
        discard(final)
    os.replace(path, final)
    sync(final.parent)


def _of_its_step(path: Path) -> bool:
    """False for a folder that was renamed; one whose state can't be read counts as what its name says."""
    try:
        return run_state(path)["step"] == step_of(path)
    except (OSError, *NOT_A_MANIFEST):
        return True
