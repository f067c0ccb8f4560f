"""Write the page of a run that ``lamina.watch`` or ``lamina.LayerMonitor`` recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_result
from lamina.jobs.kinds import Kind
from lamina.reports import charts, layers, scheduled_probes, sections
from lamina.reports.charts import Line
from lamina.reports.diagnosis import Evidence, answer, gather, headline
from lamina.reports.page import Section, callouts, figure, sentence, write_page
from lamina.reports.pages.diagnosis import batches, findings, loss_chart
from lamina.reports.records import read_run
from lamina.reports.registry import report_of
from lamina.reports.style import PALETTE
from lamina.training.monitor.alarms import describe, events, read_alarms
from lamina.training.monitor.writers import read_about


@report_of(Kind.WATCHED)
def watched_report(folder: Path) -> Path:
    """Write ``folder/report.html`` with the sections of a run's page that need only the layer monitor's records."""
    about = read_about(folder)
    parameters = about.get("parameters")
    try:
        evidence = gather(folder)
    except UserError:  # the run has no records by layer
        evidence = None
    study = read_run(folder, evidence.anomaly.step if evidence and evidence.anomaly else None)
    _, items, _ = sections.prepare(study)
    names = evidence.names if evidence else {}
    title = headline(evidence) if evidence else f"A training of {about.get('model', 'a model')}"
    cause = "Cause, and what to change" if evidence and evidence.anomaly else "What Lamina found"
    return write_page(
        folder,
        title=title,
        facts=[
            str(about.get("model", "")),
            f"status: {study.results['status'].iloc[0]}",
            f"{about['num_layers']} layers of width {about.get('hidden_size')}" if about.get("num_layers") else "",
            f"{parameters:,} parameters" if isinstance(parameters, int) else "",
            *map(str, about.get("optimizers", ())),
            "steps count from 1",
        ],
        command=study.header.get("command"),
        sections=[
            Section(
                "Diagnosis", cause, (findings(answer(evidence)) if evidence else "") + _summary(folder, about, names)
            ),
            Section("Loss", "Training loss", loss_chart(evidence)) if evidence else sections.loss(study, items, False),
            Section("Course", "Learning rate and gradient norm", _course(evidence)),
            *([batches(evidence)] if evidence else []),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.settings(study),
        ],
    )


def _course(evidence: Evidence | None) -> str:
    if evidence is None:
        return ""
    panels = {}
    for name, values in (("learning rate", evidence.rates), ("gradient norm", evidence.norms)):
        if values:
            steps, heights = charts.series(values)
            panels[name] = [Line(x=steps.tolist(), y=heights.tolist(), color=PALETTE[0], width=1.6, legend=False)]
    return figure(charts.over_steps(panels, 300), "The chart shows the gradient norm before clipping.")


def _summary(folder: Path, about: Json, names: Mapping[int, str]) -> str:
    result, alarms = read_result(folder) or {}, events(read_alarms(folder))
    texts = [sentence(f"{result['reason']}.")] if result.get("reason") else []
    if alarms:
        first = f"Lamina raised {len(alarms)} alarms. The first is" if len(alarms) > 1 else "Lamina raised an alarm"
        texts.append(
            f"{first} at {describe(alarms[0][0], names)}. For charts of the failure, run: lamina diagnose {folder}"
        )
    if result.get("skipped"):
        texts.append(f"Training skipped {result['skipped']} steps as outliers.")
    texts += [str(note) for note in about.get("notes", ())]
    return callouts(texts)
