"""Write and read study.yaml, and check that the runs in a study's folder belong together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_config, read_json, read_result, read_sealed, write_sealed
from lamina.jobs.names import CONFIG, PLAN, RESULT, STUDY
from lamina.jobs.seals import refuse_altered
from lamina.jobs.status import ENDED
from lamina.training.settings import PretrainSettings

# the settings that may differ between the runs of one experiment
_OF_A_TRIAL = {"placement", "learning_rate", "seed", "hidden_size", "base_width"}


def write_study(folder: Path, study: Mapping[str, Any]) -> None:
    write_sealed(folder / STUDY, study)


def has_study(folder: Path) -> bool:
    """Return whether the folder holds a study.yaml, which may be damaged."""
    return (folder / STUDY).is_file()


def read_record(folder: Path) -> Json:
    """Return the content of study.yaml. Raises UserError if the file is missing or incomplete."""
    if not has_study(folder):
        raise UserError(
            f"output: {str(folder)!r} holds no study to resume: {STUDY} is missing", "Give the study's folder."
        )
    try:
        study = read_sealed(folder / STUDY)
    except UserError as error:
        raise UserError(error.problem, "Restore the original file, or begin again with --overwrite.") from None
    if not isinstance(study.get("settings"), dict):
        raise UserError(f"{str(folder / STUDY)!r}: the field 'settings' is missing", "Restore the original file.")
    return study


def stored_study(folder: Path) -> Json:
    """Return the settings in study.yaml. Raises UserError if the file is missing or incomplete."""
    return read_record(folder)["settings"]


def refuse_another_trial(trial: PretrainSettings, plan: Json) -> None:
    """Raise UserError if a run's folder has a placement other than ``plan``, or settings that differ from the study."""
    folder = Path(trial.output)
    try:
        stored = read_json(folder / PLAN)
    except (OSError, ValueError):
        stored = plan
    if stored != plan:
        raise UserError(
            f"placements: {trial.placement!r} has changed since the trial in {str(folder)!r} was trained. Restore "
            "the placement to resume, or give another --output, or --overwrite."
        )
    result = read_result(folder)
    if result is None or result["status"] not in ENDED:
        return
    path = folder / CONFIG
    stored = read_config(folder)
    refuse_altered(folder)
    if not {"steps", "placement", "learning_rate", "seed"} <= set(stored):
        raise UserError(
            f"{str(path)!r}: the file is incomplete, so the trial's settings are unknown. Restore the original "
            "file, or delete the trial's folder to train the trial again."
        )
    refuse_mixture({folder.name: stored}, trial.to_dict(), free=())
    ends_early = result["status"] == "diverged" or "max_learning_rate" in result
    if not ends_early and result.get("steps", trial.steps) != trial.steps:
        raise UserError(
            f"{str(folder / RESULT)!r}: the result has {result['steps']!r} steps, but the study's trials have "
            f"{trial.steps}. Restore the original file, or delete the trial's folder to train the trial again."
        )


def refuse_mixture(
    trials: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Any], free: Collection[str] = _OF_A_TRIAL
) -> None:
    """Raise UserError if the runs of an experiment differ in a setting outside ``free``, or from ``expected``."""
    shared = {name: ("the study", value) for name, value in expected.items()}
    for trial, settings in trials.items():
        for name, value in settings.items():
            owner, other = shared.setdefault(name, (trial, value))
            if value != other and name not in free and name not in PretrainSettings.free():
                raise UserError(
                    f"trials: {trial} was trained with {name} {value!r}, but {owner} has {other!r}. Lamina ranks "
                    "only trials with the same settings. Check whether somebody edited a file, or copied a trial "
                    "here."
                )
