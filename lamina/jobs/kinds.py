"""The kinds of folders, each that of one job, and which kind a folder is of: its environment.json says."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

from lamina.jobs.names import ENVIRONMENT


class Kind(StrEnum):
    """What kind of job a folder is of; a job of your own has any other text."""

    RUN = "run"
    COMPARE = "study"
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


def kind_of(folder: Path) -> str | None:
    """The kind of job a folder is of; None if its environment.json does not say."""
    try:
        kind = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if isinstance(kind, str) else None
