"""Where a run's trained model is: model/ in the run's folder."""

from __future__ import annotations

from pathlib import Path

from lamina.jobs.manifest import MANIFEST

MODEL = "model"


def model_folder(path: str | Path) -> Path:
    """The folder of a saved model: model/ in a run's folder; any other folder is a model's itself."""
    inner = Path(path) / MODEL
    return inner if any((inner / name).is_file() for name in ("config.json", MANIFEST)) else Path(path)
