"""Write the report page of a study with claims."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lamina.jobs.kinds import Kind
from lamina.lab.papers.judging.findings import in_words
from lamina.lab.papers.pages.drawing import LOST_AT, Drawing, Series, Value, marks
from lamina.lab.papers.pages.folder import OURS, StudyFolder, arms, read_folder
from lamina.lab.papers.pages.lines import arms_title
from lamina.lab.papers.pages.study_figures import chosen
from lamina.reports import charts, tables
from lamina.reports.charts import Grid
from lamina.reports.page import Section, details, figure, moment, sentence, write_page
from lamina.reports.plotting import Figure, panels
from lamina.reports.records import rows_of
from lamina.reports.registry import drawing_of, report_of
from lamina.reports.sections import scale_note
from lamina.reports.style import colors, polish, rgba
from lamina.reports.tables import NONE, Field, Row, chip, in_form, number, swatch, table, text

_HEIGHT, _MAP = 330, 250  # the heights of a row of panels with lines or with heat maps, in pixels


@drawing_of(Kind.CLAIMS)
def write_figures(folder: Path) -> list[Path]:
    """Write a study's figures as SVG and PDF. Raises UserError if matplotlib is not installed."""
    from lamina.lab.papers.pages.matplotlib_figures import write_all

    return write_all(folder)


def plot(drawing: Drawing) -> Figure:
    grid = Grid(len(drawing.panels))
    titles = [escape(panel.heading).replace("\n", "<br>") for panel in drawing.panels]
    figure = panels(grid.down, grid.across, across=0.04, down=0.26 / grid.down, titles=titles, share_y="row")
    named: set[str] = set()
    top = drawing.height(LOST_AT)
    for index, panel in enumerate(drawing.panels):
        row, col = grid.place(index)
        if panel.cells is not None:
            figure.add_heatmap(
                x=panel.cells.columns, y=panel.cells.rows, z=panel.cells.values, coloraxis="coloraxis", row=row, col=col
            )
        for place, series in enumerate(panel.series):
            _draw(figure, drawing, series, legend=series.label not in named, row=row, col=col)
            if series.lost and top is not None:
                _lost(figure, series, marks(panel, drawing.x, place), top, row=row, col=col)
            named.add(series.label)
        if grid.lowest(index):
            figure.update_xaxes(title=escape(drawing.x.title), row=row, col=col)
    for row in range(grid.down):
        figure.update_yaxes(title=escape(drawing.y.title), row=row + 1, col=1)
    if drawing.x.has_texts:
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(drawing.x.ticks))
    elif drawing.x.log:
        ticks = list(drawing.x.ticks)
        figure.update_xaxes(type="log")
        if ticks:
            figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    if drawing.y.log:
        charts.log_axis(figure)
    _frame(figure, drawing, grid.down, len(named))
    if not drawing.joined:
        figure.update_layout(scattermode="group", scattergap=0.7)
    if drawing.is_map:
        figure.update_layout(coloraxis={"colorscale": charts.VIRIDIS, "colorbar": charts.color_bar(drawing.quantity)})
    return charts.titles_above(figure)


def _frame(figure: Figure, drawing: Drawing, down: int, lines: int) -> None:
    inside = (_MAP if drawing.is_map else _HEIGHT) * down
    headings = [panel.heading for panel in drawing.panels]
    titles = 43 if any("\n" in heading for heading in headings) else 26 if any(headings) else 6
    legend = 10 + 22 * (1 + lines // 6) if drawing.has_legend else 10
    below = 46 if all(len(str(tick)) * len(drawing.x.ticks) < 100 for tick in drawing.x.ticks) else 110
    polish(figure, inside + titles + legend + below)
    figure.update_layout(
        showlegend=drawing.has_legend,
        margin={"t": titles + legend, "b": below},
        legend={"y": 1 + titles / inside},
    )
    low, high = drawing.height(-0.05), drawing.height(1.1)
    if not drawing.is_map and not drawing.y.log and low is not None and high is not None:
        figure.update_yaxes(range=[low, high])


def _draw(figure: Figure, drawing: Drawing, series: Series, *, legend: bool, row: int, col: int) -> None:
    color, label = series.look.color, escape(series.label)
    where, bars = {"row": row, "col": col, "legendgroup": label}, None
    if series.low and drawing.spread == "bars":
        below, above = series.bars
        bars = {"type": "data", "array": above, "arrayminus": below, "thickness": 1.1, "width": 3}
    elif series.low:
        charts.band(figure, series.x, series.low, series.high, rgba(color, 0.14), **where)
    figure.add_scatter(
        x=series.x or [None],
        y=series.y or [None],
        error_y=bars,
        mode="lines" if len(series.x) > 40 else "lines+markers" if drawing.joined else "markers",
        line={"color": color, "width": 2.2, "dash": series.look.dash},
        marker={"symbol": series.look.marker, "size": 7 if len(series.x) <= 16 else 4, "color": color},
        name=label,
        showlegend=legend,
        hovertemplate=f"{label}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
        **where,
    )


def _lost(figure: Figure, series: Series, places: list[Value], top: float, *, row: int, col: int) -> None:
    """Mark the x values at which every run failed, along the top edge."""
    color, label = series.look.color, escape(series.label)
    told = [[f"{x:g}" if isinstance(x, float) else escape(str(x)), escape(ended)] for x, ended in series.lost]
    figure.add_scatter(
        x=places,
        y=[top] * len(places),
        mode="markers",
        marker={"symbol": "x-thin-open", "size": 10, "color": color, "line": {"width": 2, "color": color}},
        customdata=told,
        hovertemplate=f"{label}<br>%{{customdata[0]}}: %{{customdata[1]}}<extra></extra>",
        name=label,
        legendgroup=label,
        showlegend=False,
        cliponaxis=False,
        row=row,
        col=col,
    )


@report_of(Kind.CLAIMS)
def claims_report(folder: Path) -> Path:
    """Write report.html for a study with claims. Raises UserError if a file of the study is damaged."""
    study = read_folder(folder)
    definition, header = study.definition, study.header
    recorded = {"Settings": header.get("settings"), "The study": definition or None}
    settings = [
        details(name, tables.settings_table(verdict)) for name, verdict in recorded.items() if isinstance(verdict, dict)
    ]
    main = next((one for one in study.claims if one.get("claim") == study.name), None)
    title = f"{study.name}: {definition.get('title') or study.name}"
    return write_page(
        folder,
        title=title if main is None else f"{sentence(in_words(main['verdict']))}: {main.get('says')}",
        facts=[
            "" if main is None else title,
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
        return "<br>".join(escape(in_words(part)) for part in row.get("parts") or [row.get("ours") or "–"])

    fields = [
        Field("claim", lambda row: f"{said(row, 'says')} <code>{said(row, 'claim')}</code>", "reason"),
        Field("verdict", lambda row: chip(str(row["verdict"]), in_words(row["verdict"]))),
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
    firsts = {drawing.caption: drawing for drawing in reversed(shown)}  # each caption appears once
    html = "".join(
        figure(plot(drawing), drawing.caption if firsts[drawing.caption] is drawing else "", drawing.title)
        for drawing in shown
    )
    note = "For a paper, write the figures as SVG and PDF with <code>lamina report FOLDER --figures</code>"
    names = ", ".join(escape(drawing.title) for drawing in left_out)
    note = f'<p class="source">{note}{f". This also draws: {names}" if names else ""}.</p>'
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
    "Each difference is between runs with the same seed. If the study tunes the learning rate, the page shows each "
    "setting at its best learning rate. The 95 % interval in parentheses is Student's t interval. Holm's correction "
    "covers all claims of the study. If seeds were added after a judgment, p is also corrected for the number of "
    "judgments."
)
