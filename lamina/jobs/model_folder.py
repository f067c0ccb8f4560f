"""Where a run's trained model is: model/ in the run's folder."""

from __future__ import annotations

from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.manifest import MANIFEST

MODEL = "model"


def model_folder(path: str | Path) -> Path:
    """The folder of a saved model: model/ in a run's folder; any other folder is a model's itself."""
    inner = Path(path) / MODEL
    return inner if any((inner / name).is_file() for name in ("config.json", MANIFEST)) else Path(path)


def refuse_as_output(output: str, from_model: str) -> None:
    """Raise UserError if the output folder is, or holds, the saved model to start from."""
    target, held = Path(output).resolve(), model_folder(from_model)
    if held.exists() and target in (held.resolve(), *held.resolve().parents):
        raise UserError(f"output: {output!r} holds the model to continue from (allowed: another folder)")
