"""Write the page of a single run."""

from __future__ import annotations

from pathlib import Path

from lamina.jobs.kinds import Kind
from lamina.reports import layers, scheduled_probes, sections, tables
from lamina.reports.diagnosis import failing_step
from lamina.reports.page import Section, write_page
from lamina.reports.records import read_run, rows_of
from lamina.reports.registry import report_of
from lamina.reports.sentences import headline


@report_of(Kind.RUN)
def run_report(folder: Path) -> Path:
    study = read_run(folder, failing_step(folder))
    summary, items, color = sections.prepare(study)
    row = rows_of(study.results)[0]
    result = sections.finding(summary, color) + tables.ranking_table(summary, color)
    result += sections.cautions(study, summary, items) + tables.spike_note(summary)
    return write_page(
        folder,
        title=headline(summary),
        facts=[f"status: {row['status']}", *sections.facts(study)],
        command=study.header.get("command"),
        sections=[
            Section("Result", "Result", result),
            sections.loss(study, items, several=False),
            sections.course(items[0], "The gradient norm covers all parameters, before clipping."),
            sections.by_layer(summary, items, color),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.diagrams(study, items),
            sections.settings(study),
        ],
    )
