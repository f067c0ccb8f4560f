"""The protocol of what can be resumed: an object that stores its part of a checkpoint's run state and loads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lamina.core.json_types import Json

RunState = Mapping[str, Any]
"""The content of a checkpoint's run_state.json: JSON by name. Empty at the beginning of the run."""


class Stateful(Protocol):
    """An object to resume; add another one to ``TrainingRun.states``."""

    def state_dict(self) -> Json:
        """Its part of the run state: JSON under its own names."""
        ...

    def load_state_dict(self, state: RunState) -> None:
        """Resume from a checkpoint's whole run state; ``state["step"]`` is the checkpoint's step."""
        ...


def collected(states: Iterable[Stateful]) -> Json:
    """The parts of all objects, in order."""
    return {name: value for stateful in states for name, value in stateful.state_dict().items()}
