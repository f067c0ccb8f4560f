"""The kinds of jobs, and which kind of job a folder is of.

environment.json holds a folder's kind. Where it is damaged or older than kinds, a folder is known by a file, or by a
setting of its config.yaml, that only its kind of job writes.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.names import CLAIMS, CONFIG, COORDINATES, ENVIRONMENT, PREFLIGHT, RESULT, STUDY, TRANSFER


class Kind(StrEnum):
    """What kind of job a folder is of."""

    RUN = "run"
    STUDY = "study"
    CLAIMS = "claims"
    TRANSFER = "transfer"
    MAX_LR = "max-lr"
    COORD_CHECK = "coord-check"
    PREFLIGHT = "preflight"
    PROBING = "probing"
    EVALUATION = "evaluation"
    MODEL = "model"
    SFT = "sft"
    REWARD = "reward"
    RLHF = "rlhf"
    DPO = "dpo"
    WATCHED = "watched"


# For folders without a kind, checked in this order: a file that only this kind of job writes.
_MARKS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (Kind.COORD_CHECK, (COORDINATES,)),
    (Kind.TRANSFER, (TRANSFER,)),
    (Kind.PREFLIGHT, (PREFLIGHT,)),
    (Kind.CLAIMS, (CLAIMS,)),
    (Kind.STUDY, (STUDY,)),
)
# The same for a setting in config.yaml, which a run of pretraining also writes.
_SETTINGS = (
    (Kind.RLHF, "reward_clip"),
    (Kind.SFT, "loss_on"),
    (Kind.DPO, "beta"),
    (Kind.REWARD, "lora_rank"),
)


_COMMANDS = {
    Kind.RUN: ("pretrain",),
    Kind.STUDY: ("compare",),
    Kind.CLAIMS: ("study run",),
    Kind.PROBING: ("probe",),
    Kind.EVALUATION: ("eval",),
    Kind.MODEL: ("convert",),
}
"""The commands of the kinds that have another name than their command."""


def refuse_other_kind(folder: Path, command: str) -> None:
    """Raise UserError if another command than this one wrote the folder that it is to resume."""
    kind = kind_of(folder)
    if kind is None or command in (owners := _COMMANDS.get(kind, (str(kind),))):
        return
    wrote = "lamina.watch" if kind is Kind.WATCHED else " or ".join(f"lamina {owner}" for owner in owners)
    if _stored(folder) is None:
        raise UserError(
            f"output: {str(folder / ENVIRONMENT)!r} does not say which job wrote the folder; its other files are "
            f"{wrote}'s, so lamina {command} can't resume it (allowed: that file as it was, or a new folder)"
        )
    raise UserError(
        f"output: {str(folder)!r} was written by {wrote}, so lamina {command} can't resume it (allowed: the folder of "
        f"a lamina {command}, or a new one)"
    )


def kind_of(folder: Path) -> Kind | None:
    """The kind of job a folder is of; None if no job of Lamina's has written into it."""
    if (stored := _stored(folder)) is not None:
        return stored
    for kind, names in _MARKS:
        if any((folder / name).is_file() for name in names):
            return kind
    if isinstance(_mapping(folder / RESULT).get("probes"), dict):
        return Kind.PROBING
    settings = _names(folder / CONFIG)
    for kind, name in _SETTINGS:
        if name in settings:
            return kind
    return Kind.RUN if any((folder / name).is_file() for name in (RESULT, CONFIG)) else None


def _stored(folder: Path) -> Kind | None:
    """The kind that environment.json names; None where it is missing or damaged, or older than kinds."""
    stored = _mapping(folder / ENVIRONMENT).get("kind")
    return Kind(stored) if stored in set(Kind) else None


def _names(path: Path) -> set[str]:
    """The settings of a config.yaml, one to a line."""
    try:
        return {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    except (OSError, ValueError):
        return set()


def _mapping(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
