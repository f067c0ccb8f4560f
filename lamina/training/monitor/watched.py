"""A watched run: its settings, and how its folder is read. Loads no torch: the pages need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from lamina.core.json_types import Json
from lamina.core.values import path
from lamina.errors import UserError, one_line
from lamina.jobs.settings import Settings, above, at_least, not_below, setting
from lamina.training.setting_groups import trackers

OnDivergence = Literal["note", "stop"]


class WatchSettings(Settings):
    """What ``lamina.watch`` and ``lamina.LayerMonitor`` take."""

    output: str = setting("runs/watched", "folder of the records and the page", path)
    every: int = setting(20, "steps between two records; losses and gradients are kept for every step", at_least(1))
    layers: str | None = setting(None, "path of the list of layers, if they cannot be found (model.layers)")
    attention: bool = setting(True, "whether to record the largest attention logit and the experts' loads")
    on_divergence: OnDivergence = setting("note", "note a divergence, or stop")
    divergence_margin: float = setting(1.0, "nats above its best at which a loss counts as diverging", not_below(0.0))
    divergence_patience: int = setting(20, "steps that the loss must stay there", at_least(1))
    skip_outliers: float | None = setting(
        None, "standard deviations above the last 128 steps' mean at which a step is skipped (OLMo-core: 6)", above(0.0)
    )
    report_to: str = setting("none", "none, or a comma-separated list of tensorboard, wandb, trackio", trackers)


VERSION = 1
WATCHED = "watched.json"


def read_about(folder: Path) -> Json:
    """watched.json: what was watched; empty where it is missing or damaged."""
    try:
        about = json.loads((folder / WATCHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def check_version(folder: Path) -> None:
    """Raise UserError if a folder's records are of another version than this package writes, or damaged."""
    try:
        about = json.loads((folder / WATCHED).read_text(encoding="utf-8"))
        version = about.get("record")
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"record: {str(folder / WATCHED)!r} cannot be read ({one_line(error)})") from None
    if version != VERSION:
        raise UserError(
            f"record: {str(folder)!r} holds records of version {version!r} (allowed: {VERSION}, which this version of "
            "lamina writes; another folder for a new run)"
        )
    for name, kind in (("layers", dict), ("notes", str), ("optimizers", str)):
        entries, place = about.get(name, []), str(folder / WATCHED)
        if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
            raise UserError(f"{name}: {str(entries)[:60]} in {place!r} (allowed: a list, each a {kind.__name__})")
