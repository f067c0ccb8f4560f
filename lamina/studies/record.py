"""A study's own record: study.yaml with its digest, a copy of it, and that its trials are of one kind."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.jobs.files import read_result, read_yaml
from lamina.jobs.sealed import DIGEST, read_sealed, write_sealed
from lamina.jobs.status import ENDED
from lamina.placements import Plan
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

STUDY, COPY = "study.yaml", ".study.yaml"
HEADER = {"kind", "command", "version", "created", "settings"}
_DECIDED = ("precision", "compile")  # from auto, when the study began
# What a trial may have been told that a study's others were not, without being another experiment.
_OF_THE_MACHINE = {"output", "threads", "device", "save_steps", "keep", "report_to", "probe_every", "probes"}
_OF_A_TRIAL = {"placement", "learning_rate", "seed", "hidden_size", "base_width"}


def write_study(folder: Path, study: Mapping[str, Any]) -> None:
    """Write study.yaml and its copy; what either holds is never believed when its digest is of something else."""
    write_sealed(folder / COPY, study)
    write_sealed(folder / STUDY, study)


def has_study(folder: Path) -> bool:
    """Whether there is a study's record, whole or not."""
    return (folder / STUDY).is_file() or (folder / COPY).is_file()


def read_study(folder: Path) -> dict[str, Any]:
    """The record of the study in a folder: that of study.yaml, or of the copy where that file is not whole.

    Raises UserError naming the file where neither is whole.
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


def stored_study(folder: Path) -> dict[str, Any]:
    """The settings of the study in a folder. Raises UserError where it holds none that is whole."""
    return read_study(folder)["settings"]


def refuse_another_plan(folder: Path, placement: str, plan: Plan) -> None:
    """Raise UserError where a trial's folder holds another plan than its placement gives now."""
    try:
        stored = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if stored != json.loads(json.dumps(plan.to_dict())):
        raise UserError(
            f"placements: {placement!r} is not what it was when its trial in {str(folder)!r} was trained (allowed with "
            "--resume: the same; else another --output, or --overwrite)"
        )


def refuse_another_trial(trial: PretrainSettings) -> None:
    """Raise UserError where a trial that has ended was trained with other settings than the study gives it now."""
    folder = Path(trial.output)
    result = read_result(folder)
    if result is None or result["status"] not in ENDED:
        return
    path = folder / "config.yaml"
    stored = read_yaml(path)
    if not {"steps", "placement", "learning_rate", "seed"} <= set(stored):
        raise UserError(
            f"{str(path)!r}: cut short, so what the trial was trained with is not known (allowed: the file as it was; "
            "or delete the trial's folder to train it again)"
        )
    refuse_mixture({folder.name: stored}, trial.to_dict(), free=())
    if result["status"] != "diverged" and result.get("steps", trial.steps) != trial.steps:
        raise UserError(
            f"{str(folder / 'result.json')!r}: {result['steps']!r} steps, where the study's trials have {trial.steps} "
            "(allowed: the file as it was; or delete the trial's folder to train it again)"
        )


def refuse_mixture(
    trials: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Any], free: Collection[str] = _OF_A_TRIAL
) -> None:
    """Raise UserError where the settings that trials have stored, by the trials' names, are not of one experiment.

    ``expected``: what all must have; a setting that it does not name must be the same in all. The ``free`` ones, and
    how a trial was run, may differ.
    """
    shared = {name: ("the study", value) for name, value in expected.items()}
    for trial, settings in trials.items():
        for name, value in settings.items():
            whose, other = shared.setdefault(name, (trial, value))
            decided = name in _DECIDED and "auto" in (value, other)
            if value != other and not decided and name not in free and name not in _OF_THE_MACHINE:
                raise UserError(
                    f"trials: {trial} was trained with {name} {value!r}, but {whose} has {other!r} (allowed in one "
                    "ranking: trials of the same settings; was a file edited, or a trial copied here?)"
                )


def _read(folder: Path) -> dict[str, Any]:
    """study.yaml, whole; one from before there were digests has no copy and nothing but the known keys."""
    path = folder / STUDY
    if not (folder / COPY).is_file() and path.is_file():
        study = read_yaml(path)
        if DIGEST not in study and set(study) <= HEADER and path.read_text(encoding="utf-8").endswith("\n"):
            return study
    return read_sealed(path)
