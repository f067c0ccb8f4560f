"""The page of a study: its placements side by side."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE
from lamina.reports import layers, scheduled_probes, sections, sweeps, tables
from lamina.reports.mixture import refuse_other_experiments
from lamina.reports.page import Section, details, figure, write_page
from lamina.reports.records import Frame, read_study
from lamina.reports.registry import report_of


@report_of(Kind.COMPARE)
def study_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from a study's results.csv and trials. Raises UserError where there is no result."""
    study = read_study(Path(folder))
    refuse_other_experiments(study)
    summary, items, color = sections.prepare(study)
    several = bool((summary["learning_rates"] > 1).any())
    ranking = tables.ranking_table(summary, color) + details(
        f"All {len(study.results)} trials", tables.trials_table(study.results, color)
    )
    rates = sweeps.u_curves(study.results, color, list(summary["placement"]))
    return write_page(
        study.folder / PAGE,
        title=f"Where the norms sit: {_title(summary)}",
        facts=sections.facts(study),
        command=str(study.header.get("command") or ""),
        sections=[
            sections.what_happened(study, summary, items, color),
            Section(
                name="Ranking",
                title="Ranking by eval loss",
                html=_ranking_note(several, summary) + ranking + tables.spike_note(summary),
            ),
            sections.loss(study, items, several),
            Section(
                name="Learning rates",
                title="Learning rates",
                html=figure(rates, _RATES),
            ),
            *layers.sections(items),
            *scheduled_probes.sections(items),
            sections.diagrams(study, items),
            sections.settings(study),
        ],
    )


def _ranking_note(several: bool, summary: Frame) -> str:
    single = len(summary) == 1
    if several:
        parts = ["At its best learning rate" if single else "Each placement at its best learning rate"]
    else:
        same = summary["learning_rate"].nunique() < 2
        parts = [
            "At one learning rate" if single else f"Every placement at {'the same' if same else 'one'} learning rate"
        ]
    if summary["seeds"].max() > 1 and summary["finished"].any():
        parts.append("mean ± standard deviation over the seeds that finished")
    if (summary["eval_loss"] >= summary["bigram_entropy"]).any():
        parts.append("a rank is given to what has beaten a bigram table of the text that was read")
    if not single and not summary["finished"].all():
        some = summary["finished"].any()
        parts.append("those that did not finish stand last" if some else "none finished: ordered by status, then loss")
    return f"<p>{escape(', '.join(parts))}.</p>"


def _title(summary: Frame) -> str:
    return f"{len(summary)} placements side by side" if len(summary) > 1 else str(summary["placement"].iloc[0])


_RATES = (
    "The lower the better; the bottom of each U is the rate at which a placement is ranked (larger point), and a wide, "
    "flat U forgives a poorly chosen rate. Marks along the top edge did not finish at that rate: triangle stuck, "
    "x diverged, cross failed, square interrupted, circle too short to tell."
)
