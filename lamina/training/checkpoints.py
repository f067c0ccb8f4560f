"""Which checkpoint a run can go on from: a kill while one is written leaves it torn."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

_ZIPPED = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; those that are not are named in the log."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[-1].isdigit()]
    for path in sorted(found, key=step_of, reverse=True):
        broken = what_is_broken(path)
        if broken is None:
            return path
        logger.warning("%s: %s is missing or cut short; going on from the one before", path, broken)
    return None


def step_of(path: Path) -> int:
    """The optimiser step that a checkpoint was taken at."""
    return int(path.name.split("-")[-1])


def what_is_broken(path: Path) -> str | None:
    """The first file of a checkpoint that is missing or not whole, or None."""
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json"
    try:
        with safe_open(path / "model.safetensors", framework="numpy") as file:
            file.keys()
    except (OSError, SafetensorError):
        return "model.safetensors"
    return next((name for name in _ZIPPED if not zipfile.is_zipfile(path / name)), None)
