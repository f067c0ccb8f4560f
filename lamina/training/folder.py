"""A run's folder: who may write into it, and the records in it."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from lamina.errors import UserError
from lamina.values import writable_folder
from lamina.yaml_files import read_mapping

LOCK = ".lock"
ENVIRONMENT = "environment.json"


def in_use(folder: Path) -> bool:
    """Whether the folder holds anything but a lock, or the first file of a run that was killed before it had a name."""
    return folder.is_dir() and any(
        child.name != LOCK and not child.name.startswith(f".{ENVIRONMENT}.") for child in folder.iterdir()
    )


def refuse(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise UserError, changing nothing, where ``claim`` would."""
    if resume and overwrite:
        raise UserError("resume and overwrite contradict each other (allowed: one of them)")
    writable_folder("output", folder)
    if not in_use(folder):
        return
    if not (resume or overwrite):
        raise UserError(
            f"output: the folder {str(folder)!r} is in use (allowed: an empty or new folder, --resume to go on with "
            "what is there, --overwrite to delete it)"
        )
    if not _is_ours(folder):
        # Neither deletes nor mixes with somebody's own files: many programs keep a config.yaml.
        what = "--resume has nothing to go on with" if resume else "--overwrite leaves it alone"
        raise UserError(
            f"output: {str(folder)!r} holds something that Lamina did not write, so {what} (allowed: another folder)"
        )


def claim(folder: Path, *, resume: bool, overwrite: bool) -> bool:
    """Make ``folder`` ours to write into; True where it holds something to resume.

    Raises UserError where it holds something and neither ``resume`` nor ``overwrite`` was given, or what it holds isn't
    Lamina's, or it is no folder.
    """
    refuse(folder, resume=resume, overwrite=overwrite)
    used = in_use(folder)
    if used and overwrite:
        # the file by which the folder is known as ours goes last, so that a kill leaves one that can be overwritten
        for child in sorted(folder.iterdir(), key=lambda child: child.name == ENVIRONMENT):
            if child.name == LOCK:
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        used = False
    folder.mkdir(parents=True, exist_ok=True)
    return used


def _is_ours(folder: Path) -> bool:
    try:
        data = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        return "lamina" in data["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return any(folder.glob("checkpoints/checkpoint-*/manifest.json"))  # the file may be what was damaged


@contextmanager
def lock(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the folder: two processes in one would overwrite each other's files. Waits for up to ``wait`` seconds.

    Raises UserError where another process holds it. Does nothing on a system without such locks.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait
    with (folder / LOCK).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"output: another process writes into {str(folder)!r} (allowed: wait for it, or another folder)"
                    ) from None
                time.sleep(0.2)
        yield


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an exception; libraries wrap it in errors of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "os error 28" in str(error) or "No space left on device" in str(error):
            return True
        # torch.save's own stream keeps no errno: a write that fell short is all that it says
        if re.search(r"inline_container.*unexpected pos|PytorchStreamWriter failed|iostream error", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary name, brought to the disk, then renamed. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave an empty file under the name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON; NaN and infinities become null, so that any reader takes it."""
    write_text(path, json.dumps(finite(data), indent=2, ensure_ascii=False) + "\n")


def write_yaml(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML in the order of its keys."""
    write_text(path, yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping. Raises UserError naming the file where it is missing, unreadable or no mapping."""
    return read_mapping(path)


def finite(data: Any) -> Any:
    """The same data with None for every float that JSON has no number for."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {k: finite(v) for k, v in data.items()}
    return [finite(v) for v in data] if isinstance(data, list | tuple) else data


def read_result(folder: Path) -> dict[str, Any] | None:
    """A run's result.json, or None where the run has not ended (or the file is not whole)."""
    try:
        data = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and "status" in data else None


def environment(seed: int) -> dict[str, Any]:
    """What the run ran on: versions, machine, seed, git revision of the working directory."""
    versions = {}
    for package in ("lamina", "torch", "transformers", "accelerate", "tokenizers", "numpy", "pyarrow"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"platform": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "seed": seed,
        "git_revision": git_revision(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def git_revision() -> str | None:
    """The revision of the source tree that this package was imported from; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
