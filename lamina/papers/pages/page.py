"""The page of a study with claims: the verdicts, the arms, the figures."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE
from lamina.papers.pages.folder import OURS, StudyFolder, arms, read_folder
from lamina.papers.pages.lines import arms_title
from lamina.papers.pages.plotly_figures import plot
from lamina.papers.pages.study_figures import chosen
from lamina.reports import tables
from lamina.reports.page import Section, details, figure, moment, write_page
from lamina.reports.records import rows_of
from lamina.reports.registry import report_of
from lamina.reports.sections import scale_note
from lamina.reports.style import colors
from lamina.reports.tables import NONE, Field, Row, in_form, number, status, swatch, table, text


@report_of(Kind.CLAIMS)
def claims_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of a study with claims. Raises UserError where a file of it is damaged."""
    study = read_folder(folder)
    definition, header = study.definition, study.header
    recorded = {"Settings": header.get("settings"), "The study": definition or None}
    settings = [details(name, tables.settings_table(one)) for name, one in recorded.items() if isinstance(one, dict)]
    title = str(definition.get("title") or study.name)
    return write_page(
        folder / PAGE,
        title=f"{study.name}: {title}",
        facts=[
            "Lamina's own study" if definition.get("source") == OURS else str(definition.get("source") or ""),
            f"scale {study.scale}",
            f"{len(study.results):,} trials",
            f"lamina {header['version']}" if header.get("version") else "",
            moment(header.get("created")),
        ],
        command=header.get("command"),
        sections=[
            Section("Verdicts", "What the study found", _verdicts(study)),
            *_figures(study),
            Section("Arms", "The arms", _arms(study)),
            Section("Settings", "Settings", "".join(settings)),
        ],
    )


def _verdicts(study: StudyFolder) -> str:
    if not study.claims:
        return "<p>This study judges no claim.</p>"

    def said(row: Row, name: str) -> str:
        return escape(str(row.get(name) or ""))

    def ours(row: Row) -> str:
        return "<br>".join(escape(str(part)) for part in row.get("parts") or [row.get("ours") or "–"])

    fields = [
        Field("claim", lambda row: f"{said(row, 'says')} <code>{said(row, 'claim')}</code>", "reason"),
        status("verdict", "verdict"),
        Field("ours", ours, "reason"),
        Field("paper", lambda row: said(row, "paper") or "–", "reason"),
        Field("margin", _margin, "number"),
        Field("p (Holm)", lambda row: in_form(row.get("p_holm"), ".2g"), "number"),
        Field("seeds", lambda row: said(row, "seeds") or "–", "number"),
        Field("note", lambda row: said(row, "note"), "reason"),
    ]
    notes = "".join(f'<p class="source">{escape(note)}</p>' for note in (_HOW, *scale_note(study.results)))
    return table(fields, study.claims, "trials claims") + notes


def _margin(row: Row) -> str:
    interval = row.get("interval")
    within = ""
    if isinstance(interval, list) and len(interval) == 2:
        low, high = (in_form(end, ".3g", "–") for end in interval)
        within = f' <span class="spread">[{low}, {high}]</span>'
    margin = in_form(row.get("margin"), ".3g")
    return margin + within if margin != NONE else margin


def _figures(study: StudyFolder) -> list[Section]:
    shown, left_out = chosen(study)
    html = "".join(figure(plot(drawing), drawing.caption, drawing.title) for drawing in shown)
    note = "For a paper: <code>lamina report FOLDER --figures</code> writes them as SVG and PDF"
    names = ", ".join(escape(drawing.title) for drawing in left_out)
    note = f'<p class="source">{note}{f", and those not drawn here: {names}" if names else ""}.</p>'
    return [Section("Figures", "Figures", html + note)] if html else []


def _arms(study: StudyFolder) -> str:
    rows = arms(study)
    if rows.empty:
        return "<p>No trial has ended yet.</p>"
    color = colors(rows["placement"])
    fields = [
        Field("arm", lambda row: swatch(color[row["placement"]]) + escape(str(row["label"])), "name"),
        number("mean", ".4f", arms_title(study), "number main"),
        number("std", ".4f", "std"),
        number("learning_rate", "g", "learning rate"),
        number("trained", ".0f", "in the mean"),
        text("ended", "how all ended"),
    ]
    trials = tables.trials_table(study.results, colors(study.results["placement"]))
    return table(fields, rows_of(rows), "ranking") + details(f"All {len(study.results)} trials", trials)


_HOW = (
    "Differences are paired over seeds, each arm at its own best learning rate where the study tunes it; in brackets "
    "Student's 95 % interval; p after Holm's correction over the claims of the study and, where seeds were "
    "added after a look at the verdicts, over the looks."
)
