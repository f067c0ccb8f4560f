"""Going back after a divergence: to the last good checkpoint, past the data that did it, at a lower learning rate."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import was_written, write_json
from lamina.training.checkpointing.stateful import RunState
from lamina.training.checkpointing.store import checkpoints, listed_state
from lamina.training.optimization.order import Jump, ahead

logger = logging.getLogger(__name__)

FILE = "rollbacks.json"


def _restore(path: Path) -> None:
    """Write the file again from the checkpoint that knows what it held. Raises ValueError where none does."""
    for checkpoint in reversed(checkpoints(path.parent / "checkpoints")):
        state = listed_state(checkpoint) or {}
        if "returns" in state and was_written(path, state["returns"]):
            logger.warning("%s is altered or missing: written again from %s", path, checkpoint.name)
            write_json(path, state["returns"])
            return
    raise ValueError("no checkpoint knows it")


def is_good(state: RunState) -> bool:
    """Whether a checkpoint's run state is of a time when the loss was not on its way up."""
    return state["guard"]["above_since"] is None


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One return.

    Attributes:
        number: from 1.
        step: of the checkpoint gone back to; 0 for the initial weights.
        diverged_at: the step at which the guard gave up.
        reason: the guard's.
        skipped: first and last place in the data's order, in steps, of what is left out.
        ahead: how many steps further on the order is after ``step`` from now on.
        learning_rate_factor: of all rollbacks so far.
    """

    number: int
    step: int
    diverged_at: int
    reason: str
    skipped: tuple[int, int]
    ahead: int
    learning_rate_factor: float


@dataclass(kw_only=True)
class Rollbacks:
    """All returns of a run, kept in its folder: a run that is killed goes on with them."""

    folder: Path
    done: list[Rollback] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Rollbacks:
        """Those that a folder's run has made so far; where the file is damaged, by the newest checkpoint.

        Raises UserError where it is damaged and no checkpoint was taken after the last of them.
        """
        path = folder / FILE
        try:
            if digests.differs(path):
                _restore(path)
            entries = json.loads(path.read_text(encoding="utf-8"))
            return cls(folder=folder, done=[Rollback(**{**e, "skipped": tuple(e["skipped"])}) for e in entries])
        except FileNotFoundError:
            return cls(folder=folder)
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"resume: {str(path)!r} is cut short or altered, so where the run goes on is not known (allowed: the "
                "file as it was; else another --output, or --overwrite)"
            ) from None

    def state_dict(self) -> Json:
        """How many there are, and all of them: rollbacks.json may be lost."""
        return {"rollbacks": len(self.done), "returns": self.to_list()}

    def load_state_dict(self, state: RunState) -> None:
        """Raise UserError where the checkpoint was taken after more rollbacks than rollbacks.json has."""
        if (taken_after := int(state.get("rollbacks", 0))) > len(self.done):
            raise UserError(
                f"resume: checkpoint-{state['step']} was taken after {taken_after} rollbacks, "
                f"{str(self.folder / FILE)!r} has {len(self.done)} (allowed: the file as it was; else another "
                "--output, or --overwrite)"
            )

    @property
    def jumps(self) -> list[Jump]:
        """The data left out, for the training order."""
        kept: list[Jump] = []
        for entry in self.done:
            kept = [jump for jump in kept if jump[0] < entry.step] + [(entry.step, entry.ahead)]
        return kept

    @property
    def learning_rate_factor(self) -> float:
        """What the schedule's learning rates are multiplied by."""
        return self.done[-1].learning_rate_factor if self.done else 1.0

    def admits(self, state: RunState) -> bool:
        """Whether a checkpoint lies on the line of training that goes on: none after a step that was gone back to."""
        return all(state["step"] <= entry.step for entry in self.done[int(state["rollbacks"]) :])

    def add(self, *, step: int, diverged_at: int, reason: str, factor: float, skip: int | None) -> Rollback:
        """Note a return, on disk before anything follows from it.

        Args:
            step: of the checkpoint to go back to.
            diverged_at: the step of the divergence.
            reason: the guard's.
            factor: of the learning rate.
            skip: steps' worth of data to leave out; None for all up to the step that diverged.
        """
        before = ahead(self.jumps, step + 1)
        until = diverged_at + ahead(self.jumps, diverged_at) if skip is None else step + before + skip
        entry = Rollback(
            number=len(self.done) + 1,
            step=step,
            diverged_at=diverged_at,
            reason=reason,
            skipped=(step + before + 1, until),
            ahead=until - step,
            learning_rate_factor=self.learning_rate_factor * factor,
        )
        self.done.append(entry)
        write_json(self.folder / FILE, self.to_list())
        return entry

    def to_list(self) -> list[Json]:
        """For result.json and the folder's file."""
        return [asdict(entry) for entry in self.done]
