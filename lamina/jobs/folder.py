"""A job's folder: who may write into it, and what happens to its content."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from lamina.core.values import writable_folder
from lamina.errors import UserError
from lamina.jobs import digests, replaced
from lamina.jobs.environment import ENVIRONMENT
from lamina.jobs.files import disk_full
from lamina.jobs.ledger import LEDGER
from lamina.jobs.sealed import is_sealed

logger = logging.getLogger(__name__)

Resume: TypeAlias = bool | Literal["auto"]
"""Whether to resume what a folder holds; "auto": resume if it holds something, else begin."""
# Half-written files of a killed process, under names that nothing reads.
_DRAFTS = (
    ".gone-*",
    ".model-draft",
    "checkpoints/.draft-*",
    "checkpoints/.gone-*",
    "layers/.part-*",
    "probes/*/.part-*",
    "scores/*/.*.json.*",
    "items/*/.*.parquet.*",
    "adapter/.adapter_*",
)


def in_use(folder: Path) -> bool:
    """Whether the folder holds more than a lock and the unnamed first file of a killed run."""
    return folder.is_dir() and any(
        child.name not in replaced.APART and not child.name.startswith((f".{ENVIRONMENT}.", f".{LEDGER}."))
        for child in folder.iterdir()
    )


def refuse(folder: Path, *, resume: Resume, overwrite: bool) -> None:
    """Raise UserError wherever ``claim`` would, without changing anything.

    If a kill left old content that --overwrite had moved aside, that is resolved first.
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
            f"output: the folder {str(folder)!r} is in use (allowed: an empty or new folder, --resume to continue "
            "what is there, --overwrite to replace it)"
        )
    if not _is_ours(folder):
        # Never delete the user's own files, or mix ours with them: many programs keep a config.yaml.
        consequence = "--resume has nothing to continue" if resume else "--overwrite leaves it alone"
        raise UserError(
            f"output: {str(folder)!r} holds something that Lamina did not write, so {consequence} (allowed: another "
            "folder)"
        )


def nothing_to_resume(folder: Path) -> UserError:
    """The error for --resume in a folder where nothing was begun."""
    return UserError(
        f"output: {str(folder)!r} holds nothing to resume (allowed: the folder of what was begun; --resume=auto to "
        "begin where there is nothing yet)"
    )


def claim(folder: Path, *, resume: Resume, overwrite: bool) -> bool:
    """Make ``folder`` ours to write into; returns whether it holds something to resume. Call it inside ``lock``.

    With ``overwrite``, its content is moved aside until the new content has a result (see ``lamina.jobs.replaced``).
    From now on a ledger notes what its files hold (see ``lamina.jobs.digests``).

    Raises UserError if it holds something and neither ``resume`` nor ``overwrite`` is set, if Lamina did not write its
    content, if it is not a folder, or if there is nothing to resume.
    """
    refuse(folder, resume=resume, overwrite=overwrite)
    used = in_use(folder)
    if used and overwrite:
        replaced.set_aside(folder)
        used = False
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    if broken := digests.begin(folder):
        logger.warning("%s: %s, so files written before are not checked against it", folder, broken)
    return used


def recover(folder: Path) -> None:
    """After --overwrite was killed: put the old content back, or delete it if the new content has a result.

    Does nothing while another process works in the folder.
    """
    if replaced.is_aside(folder):
        with contextlib.suppress(UserError), lock(folder):
            pass  # taking the lock does it


def _sweep(folder: Path) -> None:
    for pattern in _DRAFTS:
        for draft in folder.glob(pattern):
            _delete(draft)
    for draft in folder.glob(".*"):
        if re.fullmatch(r"\..+\.\d+", draft.name) and (draft.is_file() or draft.is_symlink()):  # write_text's
            draft.unlink(missing_ok=True)


def _delete(draft: Path) -> None:
    """Delete a file, a link or a folder; not what a link leads to."""
    is_folder = draft.is_dir() and not draft.is_symlink()
    shutil.rmtree(draft, ignore_errors=True) if is_folder else draft.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    try:
        data = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        return "lamina" in data["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        # environment.json itself may be damaged
        by_study = is_sealed(folder / "study.yaml") or is_sealed(folder / ".study.yaml")
        return by_study or (folder / LEDGER).is_file() or any(folder.glob("checkpoints/checkpoint-*/manifest.json"))


@contextmanager
def lock(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Lock the folder: two processes in it would overwrite each other's files. Waits for up to ``wait`` seconds.

    Content that --overwrite moved aside is put back or deleted on entry (after a kill) and on exit.

    Raises UserError if another process holds the lock, or if what lies apart from the folder's content is a link.
    Without ``fcntl`` (Windows) it locks nothing.
    """
    _make(folder)
    for name in replaced.APART:
        if (folder / name).is_symlink():
            raise _is_link(folder / name)
    with _flock(folder, wait):
        replaced.resolve(folder, failed=True)
        failed = True
        try:
            yield
            failed = False
        finally:
            replaced.resolve(folder, failed=failed)
            digests.close(folder)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if disk_full(error):
            raise
        raise UserError(f"output: {str(folder)!r} can't be made: {error.strerror} (allowed: another folder)") from None


def is_locked(folder: Path) -> bool:
    """Whether a process works in the folder. Without ``fcntl`` (Windows) nobody can tell, and it is False."""
    try:
        import fcntl

        with (folder / replaced.LOCK).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


@contextmanager
def _flock(folder: Path, wait: float) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    deadline = time.monotonic() + wait
    file = _open_lock(folder / replaced.LOCK)
    try:
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
    finally:
        os.close(file)


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file, which is never emptied: a hard link may be somebody's own file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from None
        if error.errno == errno.EISDIR:
            raise UserError(f"output: {str(path)!r} is a folder (allowed: a file of Lamina's own, or none)") from None
        raise


def _is_link(path: Path) -> UserError:
    return UserError(f"output: {str(path)!r} is a link (allowed: no link there, or another folder)")
