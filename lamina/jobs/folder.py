"""A run's folder: who may write into it, and the records in it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
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
from typing import Any, Literal, TypeAlias

import yaml

from lamina.core.values import writable_folder
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError
from lamina.jobs import digests, replaced

logger = logging.getLogger(__name__)


ENVIRONMENT = "environment.json"
Resume: TypeAlias = bool | Literal["auto"]
"""Whether to go on with what a folder holds; "auto": if it holds something, else to begin."""
# What a kill leaves half written, under names that nothing reads.
_DRAFTS = (
    ".gone-*",
    ".model-draft",
    "checkpoints/.draft-*",
    "checkpoints/.gone-*",
    "layers/.part-*",
    "probes/*/.part-*",
)


def in_use(folder: Path) -> bool:
    """Whether the folder holds anything but a lock, or the first file of a run that was killed before it had a name."""
    return folder.is_dir() and any(
        child.name not in replaced.APART and not child.name.startswith((f".{ENVIRONMENT}.", f".{digests.LEDGER}."))
        for child in folder.iterdir()
    )


def refuse(folder: Path, *, resume: Resume, overwrite: bool) -> None:
    """Raise UserError, changing nothing, where ``claim`` would.

    Where a kill has left a folder whose old content was moved aside for --overwrite, that is settled first.
    """
    if resume not in (True, False, "auto"):
        raise UserError(f"resume: {resume!r} (allowed: true, false, auto)")
    if resume and overwrite:
        raise UserError("resume and overwrite contradict each other (allowed: one of them)")
    writable_folder("output", folder)
    recover(folder)
    if not in_use(folder):
        if resume is True:
            raise nothing_to_resume(folder)
        return
    if not (resume or overwrite):
        raise UserError(
            f"output: the folder {str(folder)!r} is in use (allowed: an empty or new folder, --resume to go on with "
            "what is there, --overwrite to replace it)"
        )
    if not _is_ours(folder):
        # Neither deletes nor mixes with somebody's own files: many programs keep a config.yaml.
        what = "--resume has nothing to go on with" if resume else "--overwrite leaves it alone"
        raise UserError(
            f"output: {str(folder)!r} holds something that Lamina did not write, so {what} (allowed: another folder)"
        )


def nothing_to_resume(folder: Path) -> UserError:
    """The error for --resume where nothing was begun."""
    return UserError(
        f"output: {str(folder)!r} holds nothing to resume (allowed: the folder of what was begun; --resume=auto to "
        "begin where there is nothing yet)"
    )


def claim(folder: Path, *, resume: Resume, overwrite: bool) -> bool:
    """Make ``folder`` ours to write into; True where it holds something to resume. Call it in ``lock``.

    With ``overwrite`` what it holds is moved aside until what replaces it stands (see ``lamina.jobs.replaced``).
    From now on a ledger says what its files hold (see ``lamina.jobs.digests``).

    Raises UserError where it holds something and neither ``resume`` nor ``overwrite`` was given, or what it holds isn't
    Lamina's, or it is no folder, or there is nothing to resume.
    """
    refuse(folder, resume=resume, overwrite=overwrite)
    used = in_use(folder)
    if used and overwrite:
        replaced.set_aside(folder)
        used = False
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    if broken := digests.begin(folder):
        logger.warning("%s: %s, so what was written before is not checked by it", folder, broken)
    return used


def recover(folder: Path) -> None:
    """Where --overwrite was killed: put back what it was to replace, or delete that where the new content stands.

    Does nothing while another process works in the folder.
    """
    if replaced.is_aside(folder):
        with contextlib.suppress(UserError), lock(folder):
            pass  # it is done by whoever gets the lock


def _sweep(folder: Path) -> None:
    for pattern in _DRAFTS:
        for draft in folder.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True) if draft.is_dir() else draft.unlink(missing_ok=True)
    for draft in folder.glob(".*"):
        if re.fullmatch(r"\..+\.\d+", draft.name) and draft.is_file():  # write_text's
            draft.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    try:
        data = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        return "lamina" in data["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        from lamina.jobs.sealed import is_sealed

        # the file may be what was damaged
        by_study = is_sealed(folder / "study.yaml") or is_sealed(folder / ".study.yaml")
        return (
            by_study
            or (folder / digests.LEDGER).is_file()
            or any(folder.glob("checkpoints/checkpoint-*/manifest.json"))
        )


@contextmanager
def lock(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the folder: two processes in one would overwrite each other's files. Waits for up to ``wait`` seconds.

    What --overwrite moved aside is settled when the folder is taken (after a kill) and when it is left.

    Raises UserError where another process holds it. On a system without such locks it holds nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _flock(folder, wait):
        replaced.settle(folder, failed=True)
        failed = True
        try:
            yield
            failed = False
        finally:
            replaced.settle(folder, failed=failed)
            digests.close(folder)


@contextmanager
def _flock(folder: Path, wait: float) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    deadline = time.monotonic() + wait
    with (folder / replaced.LOCK).open("w") as file:
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
    """Write a file whole or not at all: to a temporary name, brought to the disk, then renamed. Raises OSError.

    The ledger of its folder, if there is one, says what it holds.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        digests.replace(temporary, path)  # brought to the disk: else a power cut can leave an empty file under the name
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON; NaN and infinities become null, so that any reader takes it."""
    write_text(path, _json(data))


def was_written(path: Path, data: Any) -> bool:
    """Whether ``write_json`` wrote these data to a file, by its ledger: the file itself may be damaged."""
    text = _json(data).encode()
    return digests.entries(path.parent).get(path.name) == (len(text), hashlib.sha256(text).hexdigest())


def _json(data: Any) -> str:
    return json.dumps(finite(data), indent=2, ensure_ascii=False) + "\n"


def write_yaml(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML in the order of its keys."""
    write_text(path, yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping. Raises UserError naming the file where it is missing, unreadable or no mapping."""
    return read_mapping(path)


def read_written_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping that Lamina wrote. Raises UserError where it is not as it was written, too."""
    if words := digests.differs(path):
        raise UserError(f"{str(path)!r} {words} (allowed: the file as it was; --overwrite to begin again)")
    return read_yaml(path)


def finite(data: Any) -> Any:
    """The same data with None for every float that JSON has no number for."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {k: finite(v) for k, v in data.items()}
    return [finite(v) for v in data] if isinstance(data, list | tuple) else data


def read_result(folder: Path) -> dict[str, Any] | None:
    """A run's result.json, or None where the run has not ended (or the file is not what was written, which is said)."""
    path = folder / "result.json"
    if words := digests.differs(path):
        logger.warning("%s %s: it is not believed", path, words)
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
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
        "digests": digests.LEDGER,
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
