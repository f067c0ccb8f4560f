"""Folders on disk that are either whole or not there: what is costly to make is made once, under a hash."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from lamina.errors import UserError
from lamina.values import home


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """The cache's folder: the one given, else ``$LAMINA_CACHE``, else ``~/.cache/lamina``."""
    if cache_dir:
        return home("cache_dir", cache_dir)
    return home("LAMINA_CACHE", os.environ.get("LAMINA_CACHE") or "~/.cache/lamina")


def publish(folder: Path, write: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    """Make ``folder`` by writing into a folder beside it that takes its place in one step.

    Processes may race: one of them wins, and all find a whole folder afterwards. Whatever ``write`` raises leaves
    nothing behind; a folder that is there and not whole is replaced.

    Raises:
        UserError: when the cache may not be written to.
        OSError: a full disk among others, as it came.
    """
    # named by hand: tempfile.mkdtemp's folders are closed to the others who share a cache
    draft = folder.parent / f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        draft.mkdir(parents=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"the cache folder {str(folder.parent)!r} cannot be written to ({error.strerror}); "
            "set LAMINA_CACHE to a folder that can"
        ) from None
    try:
        write(draft)
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(draft, folder)
        except OSError:
            # a folder cannot replace one that holds files: another process was first, with the same content
            if not is_whole(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
