"""Which page a folder gets, by its kind."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lamina.errors import UserError

Page = Callable[[Path], Path]
"""Writes the page of a folder and returns its path."""
P = TypeVar("P", bound=Page)

_pages: dict[str, Page] = {}


def report_of(kind: str) -> Callable[[P], P]:
    """Register a function as what writes the page of a ``kind`` of folder."""

    def register(page: P) -> P:
        _pages[kind] = page
        return page

    return register


def kinds() -> list[str]:
    """The kinds of folders that have a page."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "pages")]):
        importlib.import_module(f"lamina.reports.pages.{module.name}")
    return sorted(_pages)


def report(folder: Path) -> Path:
    """Write ``folder/report.html``, whatever kind of job wrote the folder; returns the page's path.

    Raises UserError where no job has, or where its records are not whole.
    """
    folder = Path(folder)
    known, kind = kinds(), kind_of(folder)
    if kind not in known:
        raise UserError(
            f"folder: {str(folder)!r} holds {'no job' if kind is None else f'a {kind}'}, so there is no page to write "
            f"(allowed: the folder of a {', a '.join(known)})"
        )
    return _pages[kind](folder)


_MARKS = (
    ("coord-check", ("coordinates.parquet",)),
    ("transfer", ("transfer.json",)),
    ("preflight", ("preflight.json",)),
    ("study", ("study.yaml", ".study.yaml")),
)


def kind_of(folder: Path) -> str | None:
    """What the folder is of: its own word, or, in one older than that, a file that only its kind holds."""
    for kind, names in _MARKS:
        if any((folder / name).is_file() for name in names):
            return kind
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    if isinstance(result, dict) and isinstance(result.get("probes"), dict):
        return "probing"
    return "run" if (folder / "result.json").is_file() or (folder / "config.yaml").is_file() else None
