"""Figures and pages from the records of runs and studies. Loads neither torch nor transformers, and plotly late."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.reports.ranking import notices, summarize
    from lamina.reports.registry import report

__all__ = ["notices", "report", "summarize"]


if not TYPE_CHECKING:  # else a misspelled name would be of type Any

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'lamina.reports' has no attribute {name!r}")
        return getattr(import_module(f"lamina.reports.{'registry' if name == 'report' else 'ranking'}"), name)
