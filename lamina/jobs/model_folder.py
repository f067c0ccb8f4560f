"""Where a run's trained model is: in its folder's model/."""

from __future__ import annotations

from pathlib import Path

from lamina.jobs.manifest import MANIFEST

MODEL = "model"


def model_folder(path: str | Path) -> Path:
    """The folder of a saved model: a run's folder has it as model/, any other is one itself."""
    inner = Path(path) / MODEL
    return inner if any((inner / name).is_file() for name in ("config.json", MANIFEST)) else Path(path)
