"""The kinds of output folders, one for each type of job. environment.json names the kind."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

from lamina.jobs.names import ENVIRONMENT


class Kind(StrEnum):
    """The kind of job that wrote a folder. Users' jobs may have other kinds."""

    RUN = "run"
    COMPARE = "study"  # lamina compare wrote it
    CLAIMS = "claims"  # lamina study run wrote it
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


def kind_of(folder: Path) -> str | None:
    """Return a folder's kind, or None if environment.json names no kind."""
    try:
        kind = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if isinstance(kind, str) else None
