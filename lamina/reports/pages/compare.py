"""Write the page of `lamina compare`, with the placements side by side."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lamina.jobs.kinds import Kind
from lamina.reports import figures, layers, scheduled_probes, sections, tables
from lamina.reports.page import Section, details, figure, write_page
from lamina.reports.records import Frame, read_study
from lamina.reports.registry import report_of
from lamina.reports.sentences import headline


@report_of(Kind.COMPARE)
def compare_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from a study's results.csv and trials. Raises UserError if there are no results."""
    study = read_study(folder)
    summary, items, color = sections.prepare(study)
    several = bool((summary["learning_rates"] > 1).any())
    trials = details(
        f"All {len(study.results)} trials", tables.trials_table(study.results, color) + tables.spike_note(summary)
    )
    ranking = sections.finding(summary, color) + tables.ranking_table(summary, color) + trials
    ranking += _ranking_note(several, summary) + sections.cautions(study, summary, items)
    rates = figure(figures.u_curves(study.results, color, list(summary["placement"])), RATES)
    return write_page(
        folder,
        title=headline(summary),
        facts=sections.facts(study),
        command=study.header.get("command"),
        sections=[
            Section("Ranking", "Ranking by eval loss", ranking),
            sections.loss(study, items, several),
            Section("Learning rates", "Learning rates", rates),
            sections.by_layer(summary, items, color),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.diagrams(study, items),
            sections.settings(study),
        ],
    )


def _ranking_note(several: bool, summary: Frame) -> str:
    alone = len(summary) == 1
    same = summary["learning_rate"].nunique() < 2
    if several:
        parts = [f"The table shows {'the' if alone else 'each'} placement at its best learning rate."]
    else:
        parts = (
            []
            if alone
            else ["All placements have the same learning rate." if same else "Each placement has one learning rate."]
        )
    if summary["seeds"].max() > 1 and summary["finished"].any():
        parts.append("Values are the mean ± standard deviation over the finished seeds.")
    if not alone and (summary["eval_loss"] >= summary["bigram_entropy"]).any():
        parts.append("Lamina ranks only placements that beat a bigram table of the training text.")
    if not alone and not summary["finished"].all():
        some = summary["finished"].any()
        parts.append(
            "Placements that did not finish are last." if some else "Lamina sorts rows by status, then by loss."
        )
    return f"<p>{escape(' '.join(parts))}</p>" if parts else ""


_MARKS = (
    "Marks along the top edge show learning rates at which no run finished: triangle (stuck), x (diverged), cross "
    "(failed), square (interrupted), circle (too short to tell)."
)
RATES = (
    "Lower is better. Lamina ranks each placement at the lowest point of its curve (the larger marker). If a curve is "
    f"wide and flat, the placement tolerates a poorly chosen learning rate. {_MARKS}"
)
RATES_BY_WIDTH = (
    "The axis shows the learning rate before width scaling. If the scaling is right, the curves of all widths have "
    f"their minimum at the same learning rate. {_MARKS}"
)
