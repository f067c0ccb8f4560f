"""A cache of costly results. Each result has a folder whose name is a hash. Lamina publishes only complete folders."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from lamina.core.values import home
from lamina.errors import UserError
from lamina.jobs.manifest import seal, strays, sync, what_is_broken
from lamina.jobs.names import MANIFEST

logger = logging.getLogger(__name__)

_DRAFT = re.compile(r"\.[0-9a-f]{32}\.(?:(?P<host>[0-9a-f]{8})\.)?(?P<process>\d+)\.[0-9a-f]{8}")
_ABANDONED_SECONDS = 86_400.0
# folders that this process has checked: names, sizes and times of their files
_whole: dict[Path, list[tuple[str, int, int]]] = {}


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """Return the cache's folder: ``cache_dir``, or ``$LAMINA_CACHE``, or ``~/.cache/lamina``, in this order."""
    if cache_dir:
        return home("cache_dir", cache_dir)
    return home("LAMINA_CACHE", os.environ.get("LAMINA_CACHE") or "~/.cache/lamina")


def is_whole(folder: Path) -> bool:
    """Return whether a folder's files still have the digests in the folder's manifest.

    Log a warning for a damaged folder. A process reads the files again only if a file's size or time has changed.
    """
    if not folder.exists():
        return False
    try:
        state = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir())]
        if _whole.get(folder) == state:
            return True
        broken = what_is_broken(folder)
        if broken is None and (stray_files := strays(folder)):
            broken = f"{stray_files[0]} does not belong to the folder"
    except OSError as error:
        state, broken = [], str(error.strerror)
    if broken is None:
        _whole[folder] = state
    elif (folder / MANIFEST).exists():  # without a manifest it is from an older Lamina, or half deleted
        logger.warning("%s: %s. Lamina makes the folder again", folder, broken)
    return broken is None


def publish(folder: Path, write: Callable[[Path], object]) -> None:
    """Create ``folder`` unless it is complete. ``write`` fills a draft folder. Then Lamina adds a manifest and renames
    the draft.

    Several processes may publish a folder at once: the first process to finish publishes the folder for all. An error
    in ``write`` leaves nothing behind. ``publish`` replaces a damaged folder, and deletes drafts of killed processes.
    Raises UserError if the cache is not writable, and OSError for other errors of the disk.
    """
    if is_whole(folder):
        return
    _sweep(folder.parent)
    # not tempfile.mkdtemp, whose folders are closed to other users of a shared cache
    draft = folder.parent / f".{folder.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        draft.mkdir(parents=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"the cache folder {str(folder.parent)!r} cannot be written to ({error.strerror}). Set LAMINA_CACHE "
            "to a writable folder."
        ) from None
    try:
        write(draft)
        seal(draft)
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        try:
            os.replace(draft, folder)
            sync(folder.parent)
        except OSError:
            # renaming fails where another process was first, with the same content
            if not is_whole(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Delete the drafts of killed processes: at once if they ran on this host, and after a day if on another host."""
    for path in parent.glob(".*"):
        match = _DRAFT.fullmatch(path.name)
        if match is None:
            continue
        try:
            old = time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
        except OSError:
            continue
        if old or (match["host"] == _host() and not psutil.pid_exists(int(match["process"]))):
            shutil.rmtree(path, ignore_errors=True)


def _host() -> str:
    """Return a short name of this machine or container. Process ids are valid only on one machine or in one
    container.
    """
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()}-{uuid.getnode()}").hex[:8]
