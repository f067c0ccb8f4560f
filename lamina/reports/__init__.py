"""Figures and pages from the records of runs and studies. Loads neither torch nor transformers."""

from lamina.reports.ranking import notices, summarize
from lamina.reports.registry import report
from lamina.reports.screenshot import screenshot
from lamina.reports.sentences import sentences

__all__ = ["notices", "report", "screenshot", "sentences", "summarize"]
