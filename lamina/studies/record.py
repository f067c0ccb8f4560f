"""A study's record: study.yaml with its digest and its copy, and the check that its trials belong together."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_result, read_yaml
from lamina.jobs.sealed import DIGEST, read_sealed, write_sealed
from lamina.jobs.status import ENDED
from lamina.placements import Plan
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

STUDY, COPY = "study.yaml", ".study.yaml"
HEADER = {"kind", "command", "version", "created", "settings"}
# Settings in which a study's trials may differ and still be one experiment.
_OF_THE_MACHINE = {"output", "threads", "device", "save_steps", "keep", "report_to", "probe_every", "probes"}
_OF_A_TRIAL = {"placement", "learning_rate", "seed", "hidden_size", "base_width"}


def write_study(folder: Path, study: Mapping[str, Any]) -> None:
    """Write study.yaml and its copy; a file whose digest does not match is never used."""
    write_sealed(folder / COPY, study)
    write_sealed(folder / STUDY, study)


def has_study(folder: Path) -> bool:
    """Whether the folder holds a study's record, whole or not."""
    return (folder / STUDY).is_file() or (folder / COPY).is_file()


def read_study(folder: Path) -> Json:
    """The record of the study in a folder: study.yaml, or its copy if that file is not whole.

    Raises UserError naming the file if neither is whole.
    """
    if not has_study(folder):
        raise UserError(f"output: {str(folder)!r} holds no study to resume ({STUDY} is missing)")
    try:
        study = _read(folder)
    except UserError as error:
        try:
            study = read_sealed(folder / COPY)
        except UserError:
            raise UserError(f"{error} (allowed: the file as it was, or --overwrite to begin again)") from None
        logger.warning("%s; the study's settings are taken from its copy, %s", error, COPY)
    if not isinstance(study.get("settings"), dict):
        raise UserError(f"{str(folder / STUDY)!r}: the field 'settings' is missing")
    return study


def stored_study(folder: Path) -> Json:
    """The settings of the study in a folder. Raises UserError if it holds no whole record."""
    return read_study(folder)["settings"]


def refuse_another_plan(folder: Path, placement: str, plan: Plan) -> None:
    """Raise UserError if a trial's folder holds another plan than its placement now resolves to."""
    try:
        stored = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if stored != json.loads(json.dumps(plan.to_dict())):
        raise UserError(
            f"placements: {placement!r} has changed since its trial in {str(folder)!r} was trained (allowed with "
            "--resume: the same; else another --output, or --overwrite)"
        )


def refuse_another_trial(trial: PretrainSettings) -> None:
    """Raise UserError if a trial that ended was trained with other settings than the study now has for it."""
    folder = Path(trial.output)
    result = read_result(folder)
    if result is None or result["status"] not in ENDED:
        return
    path = folder / "config.yaml"
    stored = read_yaml(path)
    if not {"steps", "placement", "learning_rate", "seed"} <= set(stored):
        raise UserError(
            f"{str(path)!r}: cut short, so the settings of the trial are unknown (allowed: the file as it was; "
            "or delete the trial's folder to train it again)"
        )
    refuse_mixture({folder.name: stored}, trial.to_dict(), free=())
    ends_early = result["status"] == "diverged" or "max_learning_rate" in result
    if not ends_early and result.get("steps", trial.steps) != trial.steps:
        raise UserError(
            f"{str(folder / 'result.json')!r}: {result['steps']!r} steps, where the study's trials have {trial.steps} "
            "(allowed: the file as it was; or delete the trial's folder to train it again)"
        )


def refuse_mixture(
    trials: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Any], free: Collection[str] = _OF_A_TRIAL
) -> None:
    """Raise UserError if the stored settings of the trials, by the trials' names, are not of one experiment.

    ``expected``: values that all trials must have; any other setting must be the same in all. The ``free`` settings,
    and how a trial was run, may differ.
    """
    shared = {name: ("the study", value) for name, value in expected.items()}
    for trial, settings in trials.items():
        for name, value in settings.items():
            owner, other = shared.setdefault(name, (trial, value))
            if value != other and name not in free and name not in _OF_THE_MACHINE:
                raise UserError(
                    f"trials: {trial} was trained with {name} {value!r}, but {owner} has {other!r} (allowed in one "
                    "ranking: trials of the same settings; was a file edited, or a trial copied here?)"
                )


def _read(folder: Path) -> Json:
    """study.yaml, if it is whole; one older than digests has no copy and only the known keys."""
    path = folder / STUDY
    if not (folder / COPY).is_file() and path.is_file():
        study = read_yaml(path)
        if DIGEST not in study and set(study) <= HEADER and path.read_text(encoding="utf-8").endswith("\n"):
            return study
    return read_sealed(path)
