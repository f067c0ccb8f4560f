"""The check that a resumed run is the same: its settings, its examples and the model that it started from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import write_json
from lamina.posttraining.settings import TuningSettings
from lamina.training.checkpointing.identity import DATA, known_of
from lamina.training.checkpointing.stateful import RunState


@dataclass(frozen=True)
class TuningIdentity:
    """What a run computes, as stored in its checkpoints and its folder.

    Attributes:
        settings: of the run.
        data: a hash of the encoded examples.
        model: a hash of the model that it starts from, and of a reward model.
    """

    settings: TuningSettings
    data: str
    model: str

    def state_dict(self) -> Json:
        """The settings and the two hashes, by the names that a pretraining run's checkpoint has."""
        return {"settings": self.settings.to_dict(), "plan": self.model, "text": self.data}

    def load_state_dict(self, state: RunState) -> None:
        """Do nothing: ``refuse_changes`` compared it before the folder was touched."""

    def write(self, folder: Path) -> None:
        """Note the hashes in the folder: there may be no checkpoint yet."""
        write_json(folder / DATA, {"plan": self.model, "text": self.data})

    def refuse_changes(self, folder: Path) -> None:
        """Raise UserError if the examples or the model have changed since the run in ``folder`` began."""
        known = known_of(folder) or _noted(folder / DATA)
        for name, key, now in (("data", "text", self.data), ("from", "plan", self.model)):
            if known.get(key, now) != now:
                value = self.settings.data if name == "data" else self.settings.from_model
                raise UserError(
                    f"{name}: {value!r} is not what it was when the run in {str(folder)!r} began (allowed with "
                    "--resume: the same; else another --output, or --overwrite)"
                )


def _noted(path: Path) -> Json:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
