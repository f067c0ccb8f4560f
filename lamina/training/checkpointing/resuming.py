"""Find the settings, result, checkpoint and rollbacks from which a run resumes, and check that they fit together."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from lamina.core.json_types import Json
from lamina.core.yaml_files import read_mapping
from lamina.data.corpus import Corpus
from lamina.errors import UserError
from lamina.jobs.files import noted, read_config, read_json, read_result, write_json
from lamina.jobs.manifest import MODEL, refuse_damaged
from lamina.jobs.names import CONFIG, PLAN
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.seals import refuse_altered, refuse_regrown
from lamina.jobs.status import ENDED, Status
from lamina.placements import Plan
from lamina.training.checkpointing.checkpoints import Checkpoints, RunState, listed_state, run_state, what_is_broken
from lamina.training.optimization.order import Skip, ahead
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

DATA = "data.json"  # the text with which the run began
ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class RunIdentity:
    """The settings, norm placement and data of a run. A resumed run must have the same norm placement and data."""

    settings: PretrainSettings
    plan: Plan
    fingerprint: str

    def state_dict(self) -> Json:
        """Return the settings, and hashes of the norm placement, the text and the tokenizer."""
        return {"settings": self.settings.to_dict(), "plan": plan_digest(self.plan), "text": self.fingerprint}

    def load_state_dict(self, state: RunState) -> None:
        """Restore nothing, because ``refuse_changes`` compares the checkpoint with this run."""

    @property
    def text(self) -> dict[str, str]:
        return {"corpus": self.settings.corpus, "fingerprint": self.fingerprint}

    def refuse_changes(self, folder: Path) -> None:
        """Raise UserError if the text or the placement has changed since the run began."""
        known = known_of(folder)
        refuse_another_text(self.settings, folder, self.fingerprint, known)
        before = known.get("plan") or noted(folder / PLAN)
        if before and before not in (plan_digest(self.plan), json.loads(json.dumps(self.plan.to_dict()))):
            raise UserError(
                f"placement: {self.settings.placement!r} has changed since the run in {str(folder)!r} began. Restore "
                "the placement to resume. Otherwise begin again with another --output or with --overwrite."
            )


def refuse_another_text(settings: PretrainSettings, folder: Path, fingerprint: str, known: Json | None = None) -> None:
    """Raise UserError if ``fingerprint``, a hash of the text and the tokenizer, has changed since the run began."""
    known = known_of(folder) if known is None else known
    stored = known["text"] if "text" in known else noted(folder / DATA).get("fingerprint")
    if stored is not None and stored != fingerprint:
        raise UserError(
            f"corpus: {settings.corpus!r} or its tokenizer {settings.tokenizer!r} has changed since the run in "
            f"{str(folder)!r} began{_changed(settings, folder / DATA)}. Restore the text to resume. Otherwise "
            "begin again with another --output or with --overwrite."
        )


def plan_digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()


def known_of(folder: Path) -> Json:
    """Return the newest ``RunIdentity`` state in a run's checkpoints, or {} without a checkpoint."""
    for path in reversed(Checkpoints(folder / "checkpoints").paths()):
        state = listed_state(path)
        if state is not None and "settings" in state:
            kept = {"settings", "plan", "text", "records"}
            return {"checkpoint": path.name, **{name: state[name] for name in kept & state.keys()}}
    return {}


def _changed(settings: PretrainSettings, data: Path) -> str:
    """Return the end of an error message: the corpus files that changed after the run's last start."""
    if not data.is_file():
        return ""
    newer = [str(path) for path in Corpus.parse(settings.corpus).changed_since(data.stat().st_mtime)]
    return f"; changed since: {', '.join(newer[:3])}{', ...' * (len(newer) > 3)}" if newer else ""


def is_good(state: RunState) -> bool:
    """Return whether the loss was close to its best value when Lamina saved this run state."""
    return state["guard"]["above_since"] is None


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A return to an earlier checkpoint after a divergence."""

    number: int  # the rollback's number, from 1
    step: int  # the step of the restored checkpoint, or 0 for the initial weights
    diverged_at: int  # the step at which the run diverged
    reason: str
    skipped: tuple[int, int]  # the positions of the first and last skipped step in the training order
    ahead: int  # the total number of steps of data that the run has skipped
    learning_rate_factor: float  # the product of the learning-rate factors of all rollbacks so far


@dataclass(kw_only=True)
class Rollbacks:
    """All rollbacks of a run. The file rollbacks.json in the run's folder lists the rollbacks."""

    folder: Path
    done: list[Rollback] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Rollbacks:
        """Read a run's rollbacks. Raises UserError if rollbacks.json is damaged."""
        path = folder / ROLLBACKS
        try:
            entries = cast("list[Json]", read_json(path))
            return cls(folder=folder, done=[Rollback(**{**e, "skipped": tuple(e["skipped"])}) for e in entries])
        except FileNotFoundError:
            return cls(folder=folder)
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"resume: {str(path)!r} is cut short or altered, so Lamina cannot tell where to resume. Restore the "
                "original file, or begin again with another --output or with --overwrite."
            ) from None

    def state_dict(self) -> Json:
        return {"rollbacks": len(self.done)}

    def load_state_dict(self, state: RunState) -> None:
        """Raise UserError if rollbacks.json lists fewer rollbacks than the run had at the checkpoint."""
        if (taken_after := int(state.get("rollbacks", 0))) > len(self.done):
            raise UserError(
                f"resume: checkpoint-{state['step']} was saved after {taken_after} rollbacks, but "
                f"{str(self.folder / ROLLBACKS)!r} lists only {len(self.done)} rollbacks. Restore the original file, "
                "or begin again with another --output or with --overwrite."
            )

    @property
    def skips(self) -> list[Skip]:
        """The skipped data, as pairs (step, ahead). Each step n after ``step`` trains on the data of step n + ahead."""
        kept: list[Skip] = []
        for entry in self.done:
            kept = [skip for skip in kept if skip[0] < entry.step] + [(entry.step, entry.ahead)]
        return kept

    @property
    def learning_rate_factor(self) -> float:
        return self.done[-1].learning_rate_factor if self.done else 1.0

    def allows(self, state: RunState) -> bool:
        """Return whether a checkpoint is still valid. A rollback to an earlier step makes later checkpoints invalid."""
        return all(state["step"] <= entry.step for entry in self.done[int(state["rollbacks"]) :])

    def add(self, *, step: int, diverged_at: int, reason: str, factor: float, skip: int | None) -> Rollback:
        """Record a rollback to the checkpoint of ``step`` in rollbacks.json, before the rollback has any effect.

        ``factor`` multiplies the learning rate. ``skip`` is the number of steps of data to skip (default: all data up
        to the divergence).
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
        write_json(self.folder / ROLLBACKS, self.to_list())
        return entry

    def to_list(self) -> list[Json]:
        return [asdict(entry) for entry in self.done]


def stored_settings(folder: Path, free: Collection[str]) -> Json | None:
    """Return a run's settings from config.yaml and the newest checkpoint, or None if both are missing.

    A damaged config.yaml gives a warning. Raises UserError if the checkpoint is missing, too, or if a setting outside
    ``free`` differs.
    """
    path, known = folder / CONFIG, known_of(folder)
    settings = known.get("settings", {})
    if not path.is_file():
        return settings or None
    stored, whole = {}, True
    try:
        stored = read_config(folder)
    except UserError as error:
        if not settings:
            raise
        whole = False
        logger.warning("%s. Lamina reads the settings from %s", error.problem, known["checkpoint"])
        with suppress(UserError):
            stored = read_mapping(path)
    for name, value in settings.items():
        if name not in free and name in stored and stored[name] != value:
            raise UserError(
                f"{name}: {stored[name]!r} in {str(path)!r}, but {known['checkpoint']} was trained with "
                f"{value!r}. Restore this value in the file."
            )
    return {**settings, **stored} if whole else settings


def result_to_keep(folder: Path) -> Json | None:
    """Return the result to keep in a run's folder, or None. Raises UserError if the records are damaged or altered."""
    result = read_result(folder)
    if result is None or result["status"] not in ENDED:
        RunFolder(folder).require_records()
        known = known_of(folder)
        refuse_regrown(folder, known.get("records", {}), known.get("checkpoint", ""))
        return result
    refuse_altered(folder)
    if result["status"] != Status.DIVERGED and is_model_damaged(folder, missing=True):
        return {**result, "status": "interrupted"}
    return result


def is_model_damaged(folder: Path, *, missing: bool = False) -> bool:
    """Return whether a run's model is damaged, or missing (only if ``missing``). Log a warning if it is damaged."""
    try:
        if (folder / MODEL).is_dir():
            refuse_damaged(folder / MODEL)
        elif missing:
            raise UserError(f"{folder}: the model is missing")
    except UserError as error:
        logger.warning("%s. Lamina writes the model again from the last checkpoint", error.problem)
        return True
    return False


def checkpoint_to_resume(folder: Path, rollbacks: Rollbacks) -> Path | None:
    """Return the checkpoint from which to resume, or None to begin at step 0."""
    checkpoint = Checkpoints(folder).newest(rollbacks.allows)
    if checkpoint is not None:
        rollbacks.load_state_dict(run_state(checkpoint))
        return checkpoint
    existing = Checkpoints(folder).paths()
    abandoned = bool(rollbacks.done) and rollbacks.done[-1].step == 0  # the run was killed during a rollback to step 0
    # a new beginning would lose the progress
    if existing and not (abandoned and all(what_is_broken(path) is None for path in existing)):
        raise UserError(
            f"resume: {', '.join(path.name for path in existing)} in {str(folder)!r} cannot be resumed (see the "
            "warnings above). Restore the original files, or begin again with --overwrite."
        )
    return None
