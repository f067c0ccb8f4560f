"""The page of a run that ``lamina.watch`` or ``lamina.LayerMonitor`` recorded."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import read_result
from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE
from lamina.reports import figures, layers, scheduled_probes, sections
from lamina.reports.page import Section, callouts, figure, write_page
from lamina.reports.records import Study, read_run
from lamina.reports.registry import report_of
from lamina.training.monitor.alarms import read_alarms
from lamina.training.monitor.writers import read_about


@report_of(Kind.WATCHED)
def watched_report(folder: Path) -> Path:
    """Write ``folder/report.html``: the sections of a run's page that need nothing but the layer monitor's records."""
    folder = Path(folder)
    about = read_about(folder)
    study = read_run(folder)
    _, items, _ = sections.prepare(study)
    course = figures.course(items[0])
    return write_page(
        folder / PAGE,
        title=f"A training of {about.get('model', 'a model')}",
        facts=_facts(study, about),
        command=str(study.header.get("command") or ""),
        sections=[
            _summary(folder, about),
            sections.loss(study, items, several=False),
            Section(
                name="Course",
                title="Learning rate and gradient norm",
                html=figure(course, "The gradient norm is the one before clipping."),
            ),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.settings(study),
        ],
    )


def _facts(study: Study, about: Json) -> list[str]:
    status = str(study.results["status"].iloc[0])
    facts = [f"status: {status}"]
    if about.get("num_layers"):
        facts.append(f"{about['num_layers']} layers of width {about.get('hidden_size')}")
    facts += [f"{about['parameters']:,} parameters"] if isinstance(about.get("parameters"), int) else []
    return [*facts, *map(str, about.get("optimizers", ()))]


def _summary(folder: Path, about: Json) -> Section:
    result, alarms = read_result(folder) or {}, read_alarms(folder)
    texts = [str(result["reason"])] if result.get("reason") else []
    if alarms:
        steps = [int(alarm["step"]) for alarm in alarms]
        texts.append(
            f"{len(alarms)} alarm{'s' * (len(alarms) > 1)}, the first at step {min(steps)}: lamina diagnose {folder} "
            "says which layer left first."
        )
    if result.get("skipped"):
        texts.append(f"{result['skipped']} steps were skipped as outliers.")
    texts += [str(note) for note in about.get("notes", ())]
    html = callouts(texts) if texts else f"<p>{escape('No alarm.')}</p>"
    return Section(name="What happened", title="What happened", html=html)
