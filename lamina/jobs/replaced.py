"""What --overwrite replaces: kept inside the folder until what replaces it stands, and put back where it never does.

While the old content is moved, in or out, it lies in ``.replacing``, and what lies beside that is of the old content,
too; once it is all in there the folder is called ``.replaced``, and what lies beside is new. So a kill at any moment
leaves what can be told apart.
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
APART = (LOCK, REPLACED, REPLACING, _GONE)  # no part of what a folder holds


def set_aside(folder: Path) -> None:
    """Move a folder's content aside. Raises OSError."""
    aside = folder / REPLACING
    aside.mkdir()
    for child in _content(folder):
        os.replace(child, aside / child.name)
    os.replace(aside, folder / REPLACED)
    sync(folder)


def is_aside(folder: Path) -> bool:
    """Whether something was moved aside that was neither put back nor deleted."""
    return (folder / REPLACED).is_dir() or (folder / REPLACING).is_dir()


def stands(folder: Path) -> bool:
    """Whether the work in a folder has come to something: a checkpoint, a run that ended, a probe that is finished."""
    for place in [folder, *folder.glob("trials/*/")]:
        if any(place.glob("checkpoints/checkpoint-*/manifest.json")):
            return True
        result = _result(place)
        probes = result.get("probes")
        if result.get("status") in ENDED or (
            isinstance(probes, dict) and any(told.get("status") == "finished" for told in probes.values())
        ):
            return True
    return (folder / "coordinates.parquet").is_file()


def settle(folder: Path, *, failed: bool) -> None:
    """At the end of the work in a folder, or after a kill: delete what it replaced, or put that back.

    ``failed``: the work ended by an error, or is not known to have ended. The caller holds the folder's lock.
    """
    if not is_aside(folder):
        return
    unfinished = failed or _result(folder).get("status") in ("failed", "interrupted")
    if (folder / REPLACED).is_dir() and (stands(folder) or not unfinished):
        drop(folder)
        return
    if (folder / REPLACED).is_dir():
        for child in _content(folder):
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        os.replace(folder / REPLACED, folder / REPLACING)
    for child in sorted((folder / REPLACING).iterdir()):
        os.replace(child, folder / child.name)
    (folder / REPLACING).rmdir()
    sync(folder)
    logger.warning(
        "%s: what --overwrite was to replace is back: the new run came to no checkpoint and no result", folder
    )


def drop(folder: Path) -> None:
    """Delete what was replaced, once what replaces it stands."""
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
