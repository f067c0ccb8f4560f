"""Where a run's trained model is: model/ in the run's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.manifest import sha256
from lamina.jobs.names import MANIFEST

MODEL = "model"


def model_folder(path: str | Path) -> Path:
    """The folder of a saved model: model/ in a run's folder; any other folder is a model's itself."""
    inner = Path(path) / MODEL
    return inner if any((inner / name).is_file() for name in ("config.json", MANIFEST)) else Path(path)


def content_hash(path: str | Path) -> str:
    """A hash of a saved model: of its manifest, or of its configuration and weights; of its name on the hub."""
    folder = model_folder(path)
    if (folder / MANIFEST).is_file():
        return sha256(folder / MANIFEST)
    parts = [sha256(file) for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))) if file.is_file()]
    return hashlib.sha256("".join(parts or [str(path)]).encode()).hexdigest()


def refuse_as_output(output: str, model: str) -> None:
    """Raise UserError if the output folder is, or holds, a saved model that the job reads."""
    target, held = Path(output).resolve(), model_folder(model)
    if held.exists() and target in (held.resolve(), *held.resolve().parents):
        raise UserError(f"output: {output!r} holds the model to read (allowed: another folder)")
