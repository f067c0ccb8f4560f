"""What a resumed run goes on from, and that it is the same run: checked against what its checkpoints hold of it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import read_result, read_yaml
from lamina.jobs.manifest import MANIFEST
from lamina.jobs.status import ENDED
from lamina.training.checkpointing.identity import known_of
from lamina.training.checkpointing.rollback import Rollbacks
from lamina.training.checkpointing.store import checkpoints, newest_checkpoint, run_state, what_is_broken
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"


def stored_settings(folder: Path, free: Collection[str]) -> dict[str, Any] | None:
    """The settings of the run in a folder: its config.yaml's, or the newest checkpoint's where that file is not whole.

    None where there is neither. Raises UserError where the file is not whole and no checkpoint holds the settings, and
    where both are there and differ in more than the ``free`` ones: somebody has edited the file.
    """
    path = folder / CONFIG
    known = known_of(folder)
    try:
        stored = _whole(path)
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


def result_to_keep(folder: Path) -> dict[str, Any] | None:
    """The result of a run that has ended and is as it was written; None where there is something to resume or fix.

    The log names every file that is not as it was written and is not said of where it is read.
    """
    result = read_result(folder)
    ended = result is not None and result["status"] in ENDED
    said = () if ended else ("config.yaml", "rollbacks.json", "metrics.jsonl", "layers/", "probes/", "result.json")
    for line in digests.differences(folder):
        if not line.startswith(said):
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
    """The checkpoint to go on from; None to begin at step 0, where there is none or a return went back to there.

    Raises UserError where there are checkpoints and none of them can be used: to begin again would lose the run.
    """
    found = newest_checkpoint(folder, rollbacks.admits)
    if found is None:
        _refuse_to_begin_again(folder, rollbacks)
    else:
        rollbacks.load_state_dict(run_state(found))
    return found


def _refuse_to_begin_again(folder: Path, rollbacks: Rollbacks) -> None:
    there = checkpoints(folder)
    given_up = bool(rollbacks.done) and rollbacks.done[-1].step == 0  # a return to the start, killed before it cleared
    if there and not (given_up and all(what_is_broken(path) is None for path in there)):
        raise UserError(
            f"resume: none of {', '.join(path.name for path in there)} in {str(folder)!r} can be resumed from, see "
            "above (allowed: their files as they were; --overwrite to begin again)"
        )


def _whole(path: Path) -> dict[str, Any] | None:
    """A run's config.yaml; None where it is missing. Raises UserError where it is cut short."""
    if not path.is_file():
        return None
    stored = read_yaml(path)
    last = PretrainSettings.names()[-1]  # settings are written in their order, so a cut takes the last ones
    if last not in stored or not path.read_text(encoding="utf-8").endswith("\n"):
        raise UserError(f"{str(path)!r}: cut short, it should end with {last!r}")
    return stored
