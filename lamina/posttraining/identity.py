"""The check that a resumed run is the same: its settings, its examples and the model that it started from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import write_json
from lamina.posttraining.settings import TuningSettings
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.checkpointing.resuming import DATA, known_of


@dataclass(frozen=True)
class TuningIdentity:
    """What a run computes, as stored in its checkpoints and its folder.

    Attributes:
        settings: of the run.
        data: a hash of the encoded examples.
        model: a hash of the model that it starts from.
        rewards: a hash of the reward model or function; empty without.
    """

    settings: TuningSettings
    data: str
    model: str
    rewards: str = ""

    def state_dict(self) -> Json:
        """The settings and the hashes, by the names that a pretraining run's checkpoint has."""
        return {"settings": self.settings.to_dict(), **self._hashes()}

    def load_state_dict(self, state: RunState) -> None:
        """Do nothing: ``refuse_changes`` compared it before the folder was touched."""

    def write(self, folder: Path) -> None:
        """Note the hashes in the folder: there may be no checkpoint yet."""
        write_json(folder / DATA, self._hashes())

    def _hashes(self) -> Json:
        return {"plan": self.model, "text": self.data, "rewards": self.rewards}

    def refuse_changes(self, folder: Path) -> None:
        """Raise UserError if the examples or the model have changed since the run in ``folder`` began."""
        known = {**_noted(folder / DATA), **known_of(folder)}
        settings, rewards = self.settings.to_dict(), "reward_function"
        rewards = rewards if settings.get(rewards) is not None else "reward_model"
        for name, setting in (("data", "data"), ("from", "from_model"), (rewards, rewards)):
            key = {"data": "text", "from": "plan"}.get(name, "rewards")
            now = self._hashes()[key]
            if known.get(key, now) != now:
                value = settings.get(setting)
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
