"""The state from which a run resumes, checked against its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import read_result, read_yaml
from lamina.jobs.manifest import MANIFEST
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED
from lamina.training.checkpointing.identity import known_of
from lamina.training.checkpointing.rollback import Rollbacks
from lamina.training.checkpointing.store import checkpoints, newest_checkpoint, run_state, what_is_broken
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"


def stored_settings(
    folder: Path, free: Collection[str], settings_type: type[Settings] = PretrainSettings
) -> Json | None:
    """The settings of the run in a folder: from config.yaml, or from the newest checkpoint if that file is not whole.

    None if there is neither. Raises UserError if the file is not whole and no checkpoint holds the settings, and if
    both exist and differ in more than the ``free`` settings, since somebody edited the file.
    """
    path = folder / CONFIG
    known = known_of(folder)
    try:
        stored = _whole(path, settings_type)
    except UserError as error:
        if not known:
            raise
        logger.warning("%s", f"{error}; the settings are taken from {known['checkpoint']}")
        return known["settings"]
    if stored is None:
        if known:
            logger.warning("%s", f"{str(path)!r} is missing; the settings are taken from {known['checkpoint']}")
        return known.get("settings")
    settings = known.get("settings", {})
    for name, value in settings.items():
        if name not in free and name in stored and stored[name] != value:
            raise UserError(
                f"{name}: {stored[name]!r} in {str(path)!r}, but {known['checkpoint']} was trained with {value!r} "
                "(allowed with --resume: that; was the file edited?)"
            )
    if words := digests.differs(path):
        if not known:
            raise UserError(
                f"{str(path)!r} {words}, and no checkpoint holds the run's settings (allowed: the file as it was; "
                "--overwrite to begin again)"
            )
        logger.warning("%s", f"{str(path)!r} {words}; the settings are taken from {known['checkpoint']}")
        return known["settings"]
    return {**settings, **stored}


def result_to_keep(folder: Path) -> Json | None:
    """The result of a run in a folder; None, or of status interrupted, if there is something to resume or fix.

    The log names every damaged file that is not reported where it is read.
    """
    result = read_result(folder)
    ended = result is not None and result["status"] in ENDED
    elsewhere = () if ended else ("config.yaml", "rollbacks.json", "metrics.jsonl", "layers/", "probes/", "result.json")
    for line in digests.differences(folder):
        if not line.startswith(elsewhere):
            logger.warning("%s: %s", folder, line)
    if result is not None and ended and (model := folder / "model").is_dir():
        try:
            digests.refuse_damaged(model)
        except UserError as error:
            logger.warning("%s; it is written again from the last checkpoint", str(error).partition(" (allowed")[0])
            return {**result, "status": "interrupted"}
    elif result is not None and ended and digests.differs(folder / "model" / MANIFEST):
        logger.warning("%s: the model is missing; it is written again from the last checkpoint", folder)
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


def _whole(path: Path, settings_type: type[Settings]) -> Json | None:
    """A run's config.yaml; None if it is missing. Raises UserError if it is cut short."""
    if not path.is_file():
        return None
    stored = read_yaml(path)
    last = settings_type.names()[-1]  # settings are written in order, so a cut loses the last ones
    if last not in stored or not path.read_text(encoding="utf-8").endswith("\n"):
        raise UserError(f"{str(path)!r}: cut short, it should end with {last!r}")
    return stored
