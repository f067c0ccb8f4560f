"""What --overwrite replaces: kept inside the folder until the new content has a result, and put back if it never does.

While old content is being moved, in either direction, it lies in ``.replacing``, and all beside that folder is old,
too. Once all old content is in there, the folder is renamed to ``.replaced``, and all beside it is new. So old and new
can be distinguished after a kill at any moment.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from lamina.jobs.manifest import sync
from lamina.jobs.status import ENDED

logger = logging.getLogger(__name__)

LOCK = ".lock"
REPLACED, REPLACING, _GONE = ".replaced", ".replacing", ".gone-replaced"
APART = (LOCK, REPLACED, REPLACING, _GONE)  # not part of a folder's content


def set_aside(folder: Path) -> None:
    """Move a folder's content aside. Raises OSError."""
    aside = folder / REPLACING
    aside.mkdir()
    for child in _content(folder):
        os.replace(child, aside / child.name)
    os.replace(aside, folder / REPLACED)
    sync(folder)


def is_aside(folder: Path) -> bool:
    """Whether content was moved aside and neither put back nor deleted."""
    return (folder / REPLACED).is_dir() or (folder / REPLACING).is_dir()


def has_result(folder: Path) -> bool:
    """Whether the work in a folder has a result: a checkpoint, a run that ended, a finished probe, a score."""
    for place in [folder, *folder.glob("trials/*/")]:
        if any(place.glob("checkpoints/checkpoint-*/manifest.json")):
            return True
        result = _result(place)
        probes = result.get("probes")
        if result.get("status") in ENDED or (
            isinstance(probes, dict) and any(record.get("status") == "finished" for record in probes.values())
        ):
            return True
    return (folder / "coordinates.parquet").is_file() or any(folder.glob("scores/*/*.json"))


def resolve(folder: Path, *, failed: bool) -> None:
    """At the end of the work in a folder, or after a kill: delete the old content, or put it back.

    ``failed``: the work ended with an error, or is not known to have ended. The caller holds the folder's lock.
    """
    if not is_aside(folder):
        return
    unfinished = failed or _result(folder).get("status") in ("failed", "interrupted")
    if (folder / REPLACED).is_dir() and (has_result(folder) or not unfinished):
        drop(folder)
        return
    if (folder / REPLACED).is_dir():
        clear(folder)
        os.replace(folder / REPLACED, folder / REPLACING)
    for child in sorted((folder / REPLACING).iterdir()):
        os.replace(child, folder / child.name)
    (folder / REPLACING).rmdir()
    sync(folder)
    logger.warning(
        "%s: the content that --overwrite was to replace is back: the new run left no checkpoint and no result", folder
    )


def clear(folder: Path) -> None:
    """Delete all that the work in a folder has written. The caller holds the folder's lock."""
    for child in _content(folder):
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def drop(folder: Path) -> None:
    """Delete the old content, once the new content has a result."""
    gone = folder / _GONE
    if (folder / REPLACED).is_dir():
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder / REPLACED, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _content(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.name not in APART)


def _result(folder: Path) -> dict:
    try:
        data = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
