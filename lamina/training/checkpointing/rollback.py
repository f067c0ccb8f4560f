"""Rollback after a divergence: to the last good checkpoint, skipping the data that led to it, at a lower rate."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import write_json
from lamina.training.checkpointing.stateful import RunState
from lamina.training.optimization.order import Skip, ahead

FILE = "rollbacks.json"


def is_good(state: RunState) -> bool:
    """Whether the loss was not rising when the checkpoint with this run state was taken."""
    return state["guard"]["above_since"] is None


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One rollback.

    Attributes:
        number: from 1.
        step: of the checkpoint that was restored; 0 for the initial weights.
        diverged_at: the step at which the guard stopped the run.
        reason: the guard's.
        skipped: first and last position of the skipped data in the training order, in steps.
        ahead: by how many steps the order is ahead after ``step`` from now on.
        learning_rate_factor: the product of all rollbacks so far.
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
    """All rollbacks of a run, stored in its folder so that a killed run resumes with them."""

    folder: Path
    done: list[Rollback] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Rollbacks:
        """Return the rollbacks so far of a folder's run. Raises UserError if their file is damaged."""
        path = folder / FILE
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            return cls(folder=folder, done=[Rollback(**{**e, "skipped": tuple(e["skipped"])}) for e in entries])
        except FileNotFoundError:
            return cls(folder=folder)
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"resume: {str(path)!r} is cut short or altered, so where to resume is unknown (allowed: the "
                "file as it was; else another --output, or --overwrite)"
            ) from None

    def state_dict(self) -> Json:
        """Return their number."""
        return {"rollbacks": len(self.done)}

    def load_state_dict(self, state: RunState) -> None:
        """Raise UserError if the checkpoint was taken after more rollbacks than rollbacks.json holds."""
        if (taken_after := int(state.get("rollbacks", 0))) > len(self.done):
            raise UserError(
                f"resume: checkpoint-{state['step']} was taken after {taken_after} rollbacks, "
                f"{str(self.folder / FILE)!r} has {len(self.done)} (allowed: the file as it was; else another "
                "--output, or --overwrite)"
            )

    @property
    def skips(self) -> list[Skip]:
        """The skipped data, for the training order."""
        kept: list[Skip] = []
        for entry in self.done:
            kept = [skip for skip in kept if skip[0] < entry.step] + [(entry.step, entry.ahead)]
        return kept

    @property
    def learning_rate_factor(self) -> float:
        """The factor on the schedule's learning rates."""
        return self.done[-1].learning_rate_factor if self.done else 1.0

    def allows(self, state: RunState) -> bool:
        """Whether a checkpoint is still valid: not later than a step that the run has since rolled back to."""
        return all(state["step"] <= entry.step for entry in self.done[int(state["rollbacks"]) :])

    def add(self, *, step: int, diverged_at: int, reason: str, factor: float, skip: int | None) -> Rollback:
        """Add a rollback; it is on disk before anything acts on it.

        Args:
            step: of the checkpoint to restore.
            diverged_at: the step of the divergence.
            reason: the guard's.
            factor: on the learning rate.
            skip: steps' worth of data to skip; None for all up to the step that diverged.
        """
        before = ahead(self.skips, step + 1)
        until = diverged_at + ahead(self.skips, diverged_at) if skip is None else step + before + skip
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
        """The rollbacks for result.json and rollbacks.json."""
        return [asdict(entry) for entry in self.done]
