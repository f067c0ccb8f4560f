"""Checkpoints that are whole or not there: drafts with checksums, renamed when they are on disk, verified when read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamina.training.distributed import Processes

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
_NO_MANIFEST = (ValueError, KeyError, TypeError, AttributeError)  # what reading an altered one raises


def newest_checkpoint(folder: Path, admitted: Callable[[dict[str, Any]], bool] = lambda state: True) -> Path | None:
    """The newest whole checkpoint whose run state is ``admitted``; those that are not whole are named in the log."""
    for path in reversed(checkpoints(folder)):
        broken = what_is_broken(path)
        if broken is not None:
            logger.warning("%s: %s; going on from the one before", path, broken)
        elif admitted(run_state(path)):
            return path
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, by step. Raises OSError for a folder that can't be read."""
    there = folder.iterdir() if folder.is_dir() else ()  # glob would find nothing where reading is not allowed
    return sorted((p for p in there if re.fullmatch(r"checkpoint-\d+", p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The optimiser step that a checkpoint was taken at."""
    return int(path.name.split("-")[-1])


def run_state(path: Path) -> dict[str, Any]:
    """What a whole checkpoint says of the run beyond its tensors: the guard, what was logged, the rollbacks so far."""
    return json.loads((path / RUN_STATE).read_text(encoding="utf-8"))


def listed_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint's run state if that file is as its manifest lists it, whatever became of the others; else None."""
    try:
        return run_state(path) if _listed(path)[RUN_STATE][1] == _hash(path / RUN_STATE) else None
    except (OSError, *_NO_MANIFEST):
        return None


def what_is_broken(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file: missing, cut short or altered. None where it is whole."""
    try:
        listed = _listed(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except _NO_MANIFEST:
        return f"{MANIFEST} is cut short or altered"
    for name, (size, digest) in listed.items():
        try:
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            if _hash(path / name) != digest:
                return f"{name} is altered"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    return None


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
        files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
        mine = processes.together(lambda: {f: _settled(path / f) for f in files[processes.rank :: processes.size]})
        listed = {name: entry for part in processes.everyones(mine) for name, entry in part.items()}
        processes.by_first(lambda: _publish(path, final, listed))
    except BaseException:
        if processes.first:
            shutil.rmtree(path, ignore_errors=True)  # a full disk needs the room
        raise


def prune(folder: Path, step: int, keep: int, spared: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Once checkpoint-STEP is whole, leave ``keep`` up to it, and none after it: those are of a line given up.

    ``spared``: the newest one whose run state it accepts stays, too.
    """
    found = checkpoints(folder)
    kept = [p for p in found if step_of(p) <= step][-keep:]
    if spared is not None:
        kept += [p for p in reversed(found) if step_of(p) <= step and _accepts(spared, p)][:1]
    for path in found:
        if path not in kept:
            discard(path)


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


def _publish(path: Path, final: Path, listed: dict[str, tuple[int, str]]) -> None:
    manifest = {"checksum": _checksum(listed), "files": listed}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(path / MANIFEST)
    for folder in [path, *(p for p in path.rglob("*") if p.is_dir())]:
        _sync(folder)
    if final.exists():  # broken, or of a line that was given up: a whole one would have been gone on from
        discard(final)
    os.replace(path, final)
    _sync(final.parent)


def _listed(path: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of a checkpoint's files, by its manifest. Raises one of _NO_MANIFEST where that is altered."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    listed = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    if manifest["checksum"] != _checksum(listed):
        raise ValueError(f"{MANIFEST} is altered")
    return listed


def _settled(path: Path) -> tuple[int, str]:
    _sync(path)
    return path.stat().st_size, _hash(path)


def _checksum(listed: dict[str, tuple[int, str]]) -> str:
    return hashlib.sha256(json.dumps(sorted((n, *e) for n, e in listed.items())).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
