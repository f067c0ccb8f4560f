"""The state from which a run resumes, checked against its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_result, read_yaml
from lamina.jobs.manifest import refuse_damaged
from lamina.jobs.model_folder import MODEL
from lamina.jobs.names import CONFIG
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED, Status
from lamina.training.checkpointing.identity import known_of
from lamina.training.checkpointing.rollback import Rollbacks
from lamina.training.checkpointing.store import checkpoints, newest_checkpoint, run_state, what_is_broken
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)


def stored_settings(
    folder: Path, free: Collection[str], settings_type: type[Settings] = PretrainSettings
) -> Json | None:
    """Return the settings of a run: of config.yaml over those of its newest checkpoint; None if it holds neither.

    Raises UserError if the file is cut short and no checkpoint holds the settings, and if both exist and differ in more
    than the ``free`` settings: somebody edited the file.
    """
    path, known = folder / CONFIG, known_of(folder)
    settings = known.get("settings", {})
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    last = settings_type.names()[-1]  # settings are written in order, so a cut loses the last ones
    if not (text.endswith("\n") and f"\n{last}:" in text):
        if path.is_file() and not settings:
            raise UserError(f"{str(path)!r}: cut short, it should end with {last!r} (allowed: the file as it was)")
        return settings or None
    stored = read_yaml(path)
    for name, value in settings.items():
        if name not in free and name in stored and stored[name] != value:
            raise UserError(
                f"{name}: {stored[name]!r} in {str(path)!r}, but {known['checkpoint']} was trained with {value!r} "
                "(allowed with --resume: that; was the file edited?)"
            )
    return {**settings, **stored}


def result_to_keep(folder: Path) -> Json | None:
    """Return the result of a run in a folder; None, or of status interrupted, if there is something to resume.

    Raises UserError if there is, and its records are damaged.
    """
    result = read_result(folder)
    if result is None or result["status"] not in ENDED:
        RunFolder(folder).require_records()
    elif result["status"] != Status.DIVERGED:
        try:
            if not (folder / MODEL).is_dir():
                raise UserError(f"{folder}: the model is missing")
            refuse_damaged(folder / MODEL)
        except UserError as error:
            logger.warning("%s; it is written again from the last checkpoint", str(error).partition(" (allowed")[0])
            return {**result, "status": "interrupted"}
    return result


def checkpoint_to_resume(folder: Path, rollbacks: Rollbacks) -> Path | None:
    """The checkpoint to resume from; None to begin at step 0: there is none, or the run rolled back to the beginning.

    Raises UserError if there are checkpoints but none is usable: beginning again would lose the run.
    """
    checkpoint = newest_checkpoint(folder, rollbacks.allows)
    if checkpoint is None:
        _refuse_to_begin_again(folder, rollbacks)
    else:
        rollbacks.load_state_dict(run_state(checkpoint))
    return checkpoint


def _refuse_to_begin_again(folder: Path, rollbacks: Rollbacks) -> None:
    existing = checkpoints(folder)
    abandoned = bool(rollbacks.done) and rollbacks.done[-1].step == 0  # killed during a rollback to the beginning
    if existing and not (abandoned and all(what_is_broken(path) is None for path in existing)):
        raise UserError(
            f"resume: none of {', '.join(path.name for path in existing)} in {str(folder)!r} can be resumed from, see "
            "above (allowed: their files as they were; --overwrite to begin again)"
        )
