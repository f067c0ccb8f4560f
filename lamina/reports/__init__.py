"""Figures and pages from the records that runs and studies leave: reads files, loads neither torch nor transformers."""

from lamina.reports.building import report, run_report, study_report
from lamina.reports.notices import notices
from lamina.reports.probing import probing_report
from lamina.reports.ranking import summarize
from lamina.reports.screenshot import screenshot
from lamina.reports.sentences import sentences

__all__ = ["notices", "probing_report", "report", "run_report", "screenshot", "sentences", "study_report", "summarize"]
