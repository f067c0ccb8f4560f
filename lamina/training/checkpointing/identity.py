"""The check that a resumed run is the same run: its settings, placement and text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.core.json_types import Json
from lamina.data.corpus import Corpus
from lamina.errors import UserError
from lamina.jobs.names import PLAN
from lamina.placements import Plan
from lamina.training.checkpointing.stateful import RunState
from lamina.training.checkpointing.store import checkpoints, listed_state
from lamina.training.settings import PretrainSettings

DATA = "data.json"  # which text the run began with


@dataclass(frozen=True)
class RunIdentity:
    """What a run computes, as stored in its checkpoints and its folder.

    Attributes:
        settings: of the run.
        plan: of its placement.
        fingerprint: of the text and its tokenizer.
    """

    settings: PretrainSettings
    plan: Plan
    fingerprint: str

    def state_dict(self) -> Json:
        """The settings, and digests of the plan and of the text."""
        return {"settings": self.settings.to_dict(), "plan": plan_digest(self.plan), "text": self.fingerprint}

    def load_state_dict(self, state: RunState) -> None:
        """Do nothing: ``refuse_changes`` compared it before the folder was touched."""

    @property
    def text(self) -> dict[str, str]:
        """The content of data.json."""
        return {"corpus": self.settings.corpus, "fingerprint": self.fingerprint}

    def refuse_changes(self, folder: Path) -> None:
        """Raise UserError if the text or the placement has changed since the run in ``folder`` began."""
        known = known_of(folder)
        refuse_another_text(self.settings, folder, self.fingerprint, known)
        if not self._same_plan(folder, known):
            raise UserError(
                f"placement: {self.settings.placement!r} is not what it was when the run in {str(folder)!r} began "
                "(allowed with --resume: the same; else another --output, or --overwrite)"
            )

    def _same_plan(self, folder: Path, known: Mapping[str, Any]) -> bool:
        if "plan" in known:
            return known["plan"] == plan_digest(self.plan)
        before = _stored(folder / PLAN)
        return not before or before == json.loads(json.dumps(self.plan.to_dict()))


def refuse_another_text(settings: PretrainSettings, folder: Path, fingerprint: str, known: Json | None = None) -> None:
    """Raise UserError if the text has changed since the run in ``folder`` began; ``known``: of ``known_of``."""
    known = known_of(folder) if known is None else known
    stored = known["text"] if "text" in known else _stored(folder / DATA).get("fingerprint")
    if stored is not None and stored != fingerprint:
        raise UserError(
            f"corpus: {settings.corpus!r} or its tokenizer {settings.tokenizer!r} is not what it was when the run "
            f"in {str(folder)!r} began{_changed(settings, folder / DATA)} (allowed with --resume: the same text; "
            "else another --output, or --overwrite)"
        )


def plan_digest(plan: Plan) -> str:
    """SHA-256 of a plan's whole content."""
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()


def known_of(folder: Path) -> Json:
    """The identity in the newest checkpoint of a run's folder that holds one; empty if none does."""
    for path in reversed(checkpoints(folder / "checkpoints")):
        state = listed_state(path)
        if state is not None and "settings" in state:
            return {"checkpoint": path.name, **{name: state[name] for name in ("settings", "plan", "text")}}
    return {}


def _changed(settings: PretrainSettings, noted: Path) -> str:
    """A clause with the corpus's files that are newer than the run's last start; empty if there are none."""
    if not noted.is_file():
        return ""
    newer = [str(path) for path in Corpus.parse(settings.corpus).changed_since(noted.stat().st_mtime)]
    return f"; changed since: {', '.join(newer[:3])}{', ...' * (len(newer) > 3)}" if newer else ""


def _stored(path: Path) -> Json:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
