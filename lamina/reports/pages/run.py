"""The page of a single run."""

from __future__ import annotations

from pathlib import Path

from lamina.jobs.kinds import Kind
from lamina.reports import layers, scheduled_probes, sections, tables
from lamina.reports.page import Section, write_page
from lamina.reports.records import read_run, rows_of
from lamina.reports.registry import report_of


@report_of(Kind.RUN)
def run_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of a single run: the sections of a study's report that apply to one."""
    study = read_run(folder)
    summary, items, color = sections.prepare(study)
    row = rows_of(study.results)[0]
    return write_page(
        folder,
        title=f"A run with {row['placement']}",
        facts=[f"status: {row['status']}", *sections.facts(study)],
        command=study.header.get("command"),
        sections=[
            sections.what_happened(study, summary, items, color),
            Section("Result", "Result", tables.ranking_table(summary, color) + tables.spike_note(summary)),
            sections.loss(study, items, several=False),
            sections.course(items[0], "The gradient norm is that of all parameters together, before clipping."),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.diagrams(study, items),
            sections.settings(study),
        ],
    )
