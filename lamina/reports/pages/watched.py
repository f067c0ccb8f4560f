"""The page of a run that ``lamina.watch`` or ``lamina.LayerMonitor`` recorded."""

from __future__ import annotations

from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import read_result
from lamina.jobs.kinds import Kind
from lamina.reports import layers, scheduled_probes, sections
from lamina.reports.page import Section, callouts, write_page
from lamina.reports.records import read_run
from lamina.reports.registry import report_of
from lamina.training.monitor.alarms import describe, events, read_alarms
from lamina.training.monitor.writers import read_about


@report_of(Kind.WATCHED)
def watched_report(folder: Path) -> Path:
    """Write ``folder/report.html``: the sections of a run's page that need nothing but the layer monitor's records."""
    about, study = read_about(folder), read_run(folder)
    _, items, _ = sections.prepare(study)
    parameters = about.get("parameters")
    return write_page(
        folder,
        title=f"A training of {about.get('model', 'a model')}",
        facts=[
            f"status: {study.results['status'].iloc[0]}",
            f"{about['num_layers']} layers of width {about.get('hidden_size')}" if about.get("num_layers") else "",
            f"{parameters:,} parameters" if isinstance(parameters, int) else "",
            *map(str, about.get("optimizers", ())),
        ],
        command=study.header.get("command"),
        sections=[
            Section("What happened", "What happened", _summary(folder, about)),
            sections.loss(study, items, several=False),
            sections.course(items[0], "The gradient norm is the one before clipping."),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.settings(study),
        ],
    )


def _summary(folder: Path, about: Json) -> str:
    result, alarms = read_result(folder) or {}, events(read_alarms(folder))
    texts = [str(result["reason"])] if result.get("reason") else []
    if alarms:
        texts.append(
            f"{len(alarms)} alarm{'s' * (len(alarms) > 1)}, the first at {describe(alarms[0][0])}. For the cause, run: "
            f"lamina diagnose {folder}"
        )
    if result.get("skipped"):
        texts.append(f"{result['skipped']} steps were skipped as outliers.")
    texts += [str(note) for note in about.get("notes", ())]
    return callouts(texts) or "<p>No alarm.</p>"
