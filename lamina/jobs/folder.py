"""A job's output folder: the lock, and what --resume and --overwrite do with the folder's content."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from lamina.core.hub_access import refuse_missing_model
from lamina.core.values import real_path, refuse_special, writable_folder
from lamina.errors import UserError
from lamina.jobs.files import disk_full, noted, read_json, read_sealed
from lamina.jobs.manifest import model_folder
from lamina.jobs.names import CONFIG, COORDINATES, ENVIRONMENT, MANIFEST, METRICS, RESULT, STUDY
from lamina.jobs.status import ENDED

logger = logging.getLogger(__name__)

LOCK = ".lock"
REPLACES = ".replaces"  # marks that NAME.old has the replaced content, which Lamina deletes at the first result
_APART = (LOCK, REPLACES)  # not part of a folder's content
Resume: TypeAlias = bool | Literal["auto"]
"""Whether to resume the job in a folder. "auto" starts a new job if the folder is empty."""
# Incomplete files of a killed process. Lamina reads no files with these names.
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
    """Return whether the folder holds any file besides the files that every job writes when it starts."""
    return folder.is_dir() and not all(map(_is_beginning, folder.iterdir()))


def _is_beginning(child: Path) -> bool:
    """Return whether a job writes this file when it starts: a lock, environment.json, or an incomplete file."""
    if child.name in _APART or any(child.name.startswith(f".{name}.") for name in (ENVIRONMENT, CONFIG, STUDY)):
        return True
    return child.name == ENVIRONMENT and _is_environment(child)


def _is_environment(path: Path) -> bool:
    try:
        return "lamina" in read_json(path)["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def refuse(folder: Path, *, resume: Resume, overwrite: bool, resumes: bool = True, flag: str = "--{}") -> None:
    """Raise UserError if a job can't use the folder. This function neither locks nor changes the folder.

    ``resumes`` is true if the command has --resume. ``flag`` is the format of an option in messages, such as ``--{}``.
    """
    if resume not in (True, False, "auto"):
        raise UserError(f"resume: {resume!r} (allowed: true, false, auto)")
    if resume and overwrite:
        raise UserError("'resume' and 'overwrite' contradict each other. Give one of them.")
    writable_folder("output", folder)
    refuse_special("output", folder, levels=99, entries=2**31)
    if not in_use(folder):
        if resume is True:
            raise nothing_to_resume(folder)
        return
    if not (resume or overwrite):
        further = f"{flag.format('resume')} to continue the folder's job, or " if resumes else ""
        raise UserError(
            f"output: the folder {str(folder)!r} is not empty. Choose an empty or new folder, or add {further}"
            f"{flag.format('overwrite')} to replace the content."
        )
    if not _is_ours(folder):
        # Never delete the user's own files, or mix ours with them: many programs keep a config.yaml.
        consequence = "--resume has nothing to continue" if resume else "--overwrite does not delete these files"
        raise UserError(
            f"output: {str(folder)!r} holds files that Lamina did not write, so {consequence}. Choose another folder."
        )

    old = old_content(folder)
    if overwrite and os.path.lexists(old) and not (folder / REPLACES).is_file():
        raise UserError(
            f"output: --overwrite first renames the folder to {str(old)!r}, but this name already exists. Move the "
            "existing folder, or choose another output folder."
        )
    if overwrite and Path.cwd().is_relative_to(real_path(folder)):
        raise UserError(f"output: {str(folder)!r} contains the current folder. Run the command in another folder.")


def nothing_to_resume(folder: Path) -> UserError:
    return UserError(
        f"output: {str(folder)!r} holds nothing to resume. Give the folder of an unfinished job, or --resume=auto "
        "to begin in an empty folder."
    )


@contextmanager
def hold(
    folder: Path, *, resume: Resume = False, overwrite: bool = False, wait: float = 0.0, flag: str = "--{}"
) -> Iterator[bool]:
    """Lock a job's folder for writing. Yield whether the folder holds a job to resume.

    With ``overwrite``, Lamina renames a non-empty folder to NAME.old. When the new job has a checkpoint or a
    result, Lamina deletes NAME.old. If the job ends without checkpoint and result, Lamina keeps NAME.old and warns.
    If a new job fails before its first record, Lamina deletes the job's files.

    Raises UserError if another process has locked the folder, or if ``refuse`` rejects the folder.
    """
    if overwrite and in_use(folder):
        with lock(folder, wait=wait):
            refuse(folder, resume=resume, overwrite=overwrite)
            _set_aside(folder)
    is_made = not folder.exists()
    with lock(folder, wait=wait):
        refuse(folder, resume=resume, overwrite=False, flag=flag)
        _sweep(folder)
        ended, is_new = False, not in_use(folder)
        try:
            yield not is_new
            ended = in_use(folder) and noted(folder / RESULT).get("status") not in ("failed", "interrupted")
        except Exception:  # not Ctrl-C, after which --resume continues
            if is_new and not (has_result(folder) or any((folder / name).exists() for name in (METRICS, STUDY))):
                clear(folder)
            raise
        finally:
            if ended or has_result(folder):
                drop_old(folder)
            elif (folder / REPLACES).is_file():
                logger.warning(
                    "%s has no result yet, so Lamina keeps the replaced files in %s", folder, old_content(folder)
                )
            elif is_made and not in_use(folder):
                clear(folder)
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


def old_content(folder: Path) -> Path:
    """Return NAME.old, the folder that --overwrite keeps until the new job has a result."""
    folder = real_path(folder)
    return folder.with_name(f"{folder.name}.old")


def drop_old(folder: Path) -> None:
    """Delete NAME.old, the content that --overwrite replaced."""
    if (folder / REPLACES).is_file():
        shutil.rmtree(old_content(folder), ignore_errors=True)
        (folder / REPLACES).unlink()


def _set_aside(folder: Path) -> None:
    """Rename a folder to NAME.old. If NAME.old exists and the folder has no result, empty the folder instead."""
    old = old_content(folder)
    if (folder / REPLACES).is_file() and old.exists():
        if not has_result(folder):
            clear(folder)
            return
        drop_old(folder)
    try:
        real_path(folder).rename(old)
    except OSError as error:
        raise UserError(
            f"output: {str(folder)!r} can't be renamed to {old.name!r}: {error.strerror}. Choose another folder."
        ) from None
    folder.mkdir(exist_ok=True)
    (folder / REPLACES).touch()


def has_result(folder: Path) -> bool:
    """Return whether a folder has a checkpoint, an ended run, a finished probe, or a score."""
    for run in [folder, *folder.glob("trials/*/")]:
        if any(run.glob(f"checkpoints/checkpoint-*/{MANIFEST}")):
            return True
        result = noted(run / RESULT)
        probes = result.get("probes")
        if result.get("status") in ENDED or (
            isinstance(probes, dict) and any(record.get("status") == "finished" for record in probes.values())
        ):
            return True
    return (folder / COORDINATES).is_file() or any(folder.glob("scores/*/*.json"))


def clear(folder: Path) -> None:
    """Delete all content of a job's folder. The caller must hold the lock."""
    for child in folder.iterdir():
        if child.name not in _APART:
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def _sweep(folder: Path) -> None:
    for pattern in _DRAFTS:
        for draft in folder.glob(pattern):  # remove a link, not the link's target
            is_folder = draft.is_dir() and not draft.is_symlink()
            shutil.rmtree(draft, ignore_errors=True) if is_folder else draft.unlink(missing_ok=True)
    for draft in folder.glob(".*"):
        if re.fullmatch(r"\..+\.\d+", draft.name) and (
            draft.is_file() or draft.is_symlink()
        ):  # a temporary file of write_text
            draft.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    if _is_environment(folder / ENVIRONMENT) or any(folder.glob(f"checkpoints/checkpoint-*/{MANIFEST}")):
        return True  # environment.json itself may be damaged
    try:
        return bool(read_sealed(folder / STUDY))
    except UserError:
        return False


@contextmanager
def lock(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Create and lock the folder. Wait up to ``wait`` seconds until another process releases the lock.

    Raises UserError if another process keeps the lock, if the folder can't be created, or if ``.lock`` or
    ``.replaces`` is a link. On Windows, Lamina does not lock the folder.
    """
    _make(folder)
    for name in _APART:
        if (folder / name).is_symlink():
            raise _is_link(folder / name)
    with _flock(folder, wait):
        yield


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if disk_full(error):
            raise
        raise UserError(f"output: {str(folder)!r} can't be created: {error.strerror}. Choose another folder.") from None


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked the folder. On Windows, return False."""
    try:
        import fcntl

        with (folder / LOCK).open("r+") as file:
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
    file = _open_lock(folder / LOCK)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (folder / LOCK).exists() and os.path.samestat(os.fstat(file), (folder / LOCK).stat()):
                    break
                os.close(file)  # another process renamed the folder
                _make(folder)
                file = _open_lock(folder / LOCK)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"output: another process writes into {str(folder)!r}. Wait until that process ends, or "
                        "choose another folder."
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(file)


def _open_lock(path: Path) -> int:
    """Open the lock file without truncating it, because it may be a hard link to another program's file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from None
        if error.errno == errno.EISDIR:
            raise UserError(
                f"output: {str(path)!r} is a folder, but Lamina needs this name for its lock file. Move that folder "
                "away."
            ) from None
        raise


def _is_link(path: Path) -> UserError:
    return UserError(f"output: {str(path)!r} is a link. Remove the link, or choose another folder.")


def source_beside(field: str, source: str, output: Path, *, overwrite: bool) -> str:
    """Return the path of the saved model that a command reads, or raise UserError. This function loads no torch."""
    source = str(model_folder(source))
    refuse_missing_model(field, source)  # before the folder, which may only exist from an earlier run
    refuse(output, resume=False, overwrite=overwrite, resumes=False)
    if Path(source).exists() and real_path(output) in (real_path(source), *real_path(source).parents):
        raise UserError(f"output: {str(output)!r} contains the source model {source!r}. Choose another folder.")
    return source
