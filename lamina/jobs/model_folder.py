"""The folder of a run's trained model: model/ in the run's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.manifest import sha256
from lamina.jobs.names import MANIFEST

MODEL = "model"


def model_folder(path: str | Path) -> Path:
    """Return the folder of a saved model: model/ in a run's folder, or else the folder itself."""
    inner = Path(path) / MODEL
    return inner if any((inner / name).is_file() for name in ("config.json", MANIFEST)) else Path(path)


def content_hash(path: str | Path) -> str:
    """Hash a saved model by its manifest, or by its configuration and weights, or by its name on the hub."""
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
