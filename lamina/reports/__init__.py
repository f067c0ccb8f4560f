"""Figures and pages about runs and studies. Importing this package does not load torch, transformers or plotly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.reports.ranking import notices, summarize
    from lamina.reports.registry import draw, ending, report

__all__ = ["draw", "ending", "notices", "report", "summarize"]


if not TYPE_CHECKING:  # else a misspelled name would be of type Any

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'lamina.reports' has no attribute {name!r}")
        of_registry = name in ("draw", "ending", "report")
        return getattr(import_module(f"lamina.reports.{'registry' if of_registry else 'ranking'}"), name)
