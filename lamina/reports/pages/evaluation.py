"""The page of an evaluation: the table, a figure of it, and every number."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULT, RESULTS
from lamina.reports import tables
from lamina.reports.page import Section, callouts, details, figure, moment, write_page
from lamina.reports.records import is_number, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import colors, polish
from lamina.reports.tables import (
    NONE,
    Field,
    Row,
    chip,
    in_form,
    number,
    placements,
    status,
    table,
    text,
    with_spread,
)


@report_of(Kind.EVALUATION, needs="evaluation")
def evaluation_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of its result.json and results.csv."""
    result, rows = read_json(folder / RESULT), rows_of(pd.read_csv(folder / RESULTS))
    printed, models, units = result["table"], result["models"], result["units"]
    color = colors([line["arm"] for line in printed["lines"]])
    limit = result["settings"].get("limit")
    unfinished = [f"{result['status']}: {result['reason']}"] if result["reason"] else []
    scores = callouts(unfinished) + _scores(printed, color) + f'<p class="source">{escape(_SCORES)}</p>'
    notes = [{**unit, "note": note} for unit in units for note in unit["notes"]]
    return write_page(
        folder,
        title="What the models can do",
        facts=[
            f"status: {result['status']}",
            f"{len(models)} model{'s' * (len(models) != 1)}",
            f"at most {limit} items per task" if limit else "",
            f"{sum(unit['seconds'] for unit in units):,.0f} seconds",
            moment(result.get("created")),
        ],
        command=result.get("command"),
        sections=[
            Section("Scores", "Scores", scores),
            Section("Paired", "Is a difference real?", _paired(result.get("paired") or [])),
            Section("Figure", "Side by side", figure(_bars(printed, color), _BARS)),
            Section("Models", "Models", table(_MODELS, models, "trials")),
            Section("Notes", "Notes", table(_NOTES, notes, "trials") if notes else ""),
            Section("Numbers", "All numbers", details("All numbers", table(_NUMBERS, rows, "numbers")) if rows else ""),
            Section("Settings", "Settings", details("Settings", tables.settings_table(result["settings"]))),
        ],
    )


_MODELS = (
    text("name", "model", kind="name"),
    text("arm"),
    number("seed", ".0f"),
    status("status", "run"),
    number("parameters", ",.0f"),
    text("path", kind="reason"),
)
_NOTES = (text("model", kind="name"), text("unit", "task"), text("note", kind="reason"))
_NUMBERS = (
    text("model", kind="name"),
    text("task"),
    text("metric"),
    text("filter"),
    number("value", ".5g"),
    number("stderr", ".2g", "standard error"),
    number("items", ",.0f"),
    number("num_fewshot", ".0f", "examples"),
    number("chance", ".3g"),
)
_PAIRED = (
    text("model", kind="name"),
    text("column", "task"),
    text("metric"),
    number("difference", "+.2%"),
    number("low", "+.2%", "95 % from"),
    number("high", "+.2%", "to"),
    number("won", ",.0f", "it alone right"),
    number("lost", ",.0f", "the first alone"),
    number("p_holm", ".2g", "p (Holm)"),
    number("smallest", ".2%", "smallest to show"),
    number("items", ",.0f"),
)
_SCORES = (
    "Shares (acc, acc_norm, exact_match, ...) in percent; ± is the sample standard deviation over the runs of an arm. "
    "The best number of each column is bold. Diverged, stuck and failed runs are left out and counted."
)
_BARS = "The shares of the table. Bars: mean over the runs; lines: sample standard deviation where there are several."


def _paired(rows: list[Json]) -> str:
    """Return the table of differences from the first model; nothing for a single model."""
    if not rows:
        return ""
    about = (
        f"Each model minus {rows[0]['against']}, item by item, with a 95 % interval. p: McNemar's exact test of the "
        "items that one of the two alone has right (a paired t test for other scores), adjusted over the tasks by "
        "Holm's method. So many items show the smallest difference four times in five."
    )
    return table(_PAIRED, rows, "trials") + f'<p class="source">{escape(about)}</p>'


def _scores(printed: Json, color: dict[str, str]) -> str:
    rows = [{**line, "place": place} for place, line in enumerate(printed["lines"])]

    def cell(at: int) -> Field:
        best = printed["best"][at]
        best = best if isinstance(best, list) else [best]  # one, in older records

        def html(row: Row) -> str:
            shown = in_form(row["mean"][at], ".2f")
            bold = row["place"] in best and len(rows) > 1 and shown != NONE
            return with_spread(f"<b>{shown}</b>" if bold else shown, row["std"][at], ".2f")

        level = (printed.get("chance") or [None] * (at + 1))[at]
        guessed = f" (chance {level:.1f})" if is_number(level) else ""
        return Field(printed["headings"][at] + guessed, html, "number")

    def runs(row: Row) -> str:
        reasons = "".join(f" {chip(str(reason), f'{count} {reason}')}" for reason, count in row["left_out"].items())
        return f"{row['runs']}{reasons}"

    scores = (cell(at) for at in range(len(printed["headings"])))
    return table([placements(color, "arm", "model"), Field("runs", runs), *scores], rows, "ranking")


def _bars(printed: Json, color: dict[str, str]) -> go.Figure | None:
    """Draw the shares as groups of bars; None if the table has none."""
    scored = [at for at, share in enumerate(printed["shares"]) if share]
    if not scored:
        return None
    chart = go.Figure()
    for line in printed["lines"]:
        std = [line["std"][at] if is_number(line["std"][at]) else 0.0 for at in scored]
        chart.add_bar(
            x=[escape(printed["headings"][at]) for at in scored],
            y=[line["mean"][at] for at in scored],
            name=escape(line["arm"]),
            marker_color=color[line["arm"]],
            error_y={"type": "data", "array": std, "visible": any(std)},
        )
    return polish(chart.update_layout(barmode="group").update_yaxes(title="percent", rangemode="tozero"), 380)
