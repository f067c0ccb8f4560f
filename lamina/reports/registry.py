"""Which page a folder gets, by its kind."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lamina.errors import UserError
from lamina.jobs.kinds import Kind, kind_of

Page = Callable[[Path], Path]
"""Writes the page of a folder and returns its path."""
P = TypeVar("P", bound=Page)

_CLAIMS = "lamina.papers.pages.page"  # by name: a floor above this one
_pages: dict[Kind, Page] = {}


def report_of(kind: Kind) -> Callable[[P], P]:
    """Register a function that writes the page of a ``kind`` of folder."""

    def register(page: P) -> P:
        _pages[kind] = page
        return page

    return register


def kinds() -> list[Kind]:
    """The kinds of folders that have a page."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "pages")]):
        importlib.import_module(f"lamina.reports.pages.{module.name}")
    importlib.import_module(_CLAIMS)
    return sorted(_pages)


def report(folder: Path) -> Path:
    """Write ``folder/report.html``, whatever kind of job wrote the folder; returns the page's path.

    Raises UserError if no job wrote it, or its records are damaged.
    """
    folder = Path(folder)
    known, kind = kinds(), kind_of(folder)
    if kind is None or kind not in known:
        raise UserError(
            f"folder: {str(folder)!r} holds {'no job' if kind is None else f'a {kind}'}, so there is no page to write "
            f"(allowed: a folder of: {', '.join(known)})"
        )
    return _pages[kind](folder)
