"""What can be resumed: an object that puts its part into a checkpoint's run state and takes it back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

RunState = Mapping[str, Any]
"""What run_state.json of a checkpoint holds: JSON by name. An empty one stands for the beginning of the run."""


class Stateful(Protocol):
    """One more thing to resume is one more of these in ``TrainingRun.states``."""

    def state_dict(self) -> dict[str, Any]:
        """Its part of the run state: JSON by names of its own."""
        ...

    def load_state_dict(self, state: RunState) -> None:
        """Resume from a checkpoint's whole run state; ``state["step"]`` is the step it was taken at."""
        ...


def collected(states: Iterable[Stateful]) -> dict[str, Any]:
    """The parts of all, in their order."""
    return {name: value for each in states for name, value in each.state_dict().items()}
