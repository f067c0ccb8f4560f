"""Figures and pages from the records that runs and studies leave: reads files, loads neither torch nor transformers."""

from lamina.reports.notices import notices
from lamina.reports.ranking import summarize
from lamina.reports.registry import report
from lamina.reports.screenshot import screenshot
from lamina.reports.sentences import sentences

__all__ = ["notices", "report", "screenshot", "sentences", "summarize"]
