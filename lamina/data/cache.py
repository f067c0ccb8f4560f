"""A cache for costly results. Each result has a folder named by a hash. Only complete folders appear in the cache."""

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
# folders that this process has checked, with the names, sizes and times of the files
_whole: dict[Path, list[tuple[str, int, int]]] = {}


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """Return the cache's folder: ``cache_dir``, or else ``$LAMINA_CACHE``, or else ``~/.cache/lamina``."""
    if cache_dir:
        return home("cache_dir", cache_dir)
    return home("LAMINA_CACHE", os.environ.get("LAMINA_CACHE") or "~/.cache/lamina")


def is_whole(folder: Path) -> bool:
    """Return whether a folder's files are unchanged since Lamina wrote them. Log a warning for a damaged folder."""
    if not folder.exists():
        return False
    try:
        state = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir())]
        if _whole.get(folder) == state:
            return True
        broken = what_is_broken(folder)
        if broken is None and (stray_files := strays(folder)):
            broken = f"{stray_files[0]} is not one of the folder's own files"
    except OSError as error:
        state, broken = [], str(error.strerror)
    if broken is None:
        _whole[folder] = state
    elif (folder / MANIFEST).exists():  # a folder without a manifest is from an older Lamina, or half deleted
        logger.warning("%s: %s. Lamina creates the folder again", folder, broken)
    return broken is None


def publish(folder: Path, write: Callable[[Path], object]) -> None:
    """Create a folder in the cache, or replace a damaged folder. Leave a complete folder unchanged.

    ``write`` fills a temporary folder, which Lamina then renames. Several processes may create the same folder at once.
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
            # renaming fails if another process has created the same folder
            if not is_whole(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Delete the temporary folders of ended processes on this machine, and all temporary folders older than a day."""
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
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()}-{uuid.getnode()}").hex[:8]
