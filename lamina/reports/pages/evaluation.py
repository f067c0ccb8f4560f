"""The page of an evaluation: the table, a figure of it, and every number."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE, RESULT, RESULTS
from lamina.reports import tables
from lamina.reports.page import Section, callouts, details, figure, moment, write_page
from lamina.reports.palette import colors
from lamina.reports.records import rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import polish
from lamina.reports.table import NONE, Field, Row, Table, chip, named, number, text


@report_of(Kind.EVALUATION)
def evaluation_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of its result.json and results.csv. Raises UserError where these are not whole."""
    folder = Path(folder)
    try:
        known = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        rows = rows_of(pd.read_csv(folder / RESULTS))
        return _page(folder, known, rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{str(folder)!r}: no whole evaluation ({message})") from None


def _page(folder: Path, known: Json, rows: list[Json]) -> Path:
    printed, models = known["table"], known["models"]
    color = colors([line["arm"] for line in printed["lines"]])
    seconds = sum(unit["seconds"] for unit in known["units"])
    limit = known["settings"].get("limit")
    unfinished = [f"{known['status']}: {known['reason']}"] if known["reason"] else []
    drawn = _bars(printed, color)
    sections = [
        Section(
            name="Scores",
            title="Scores",
            html=callouts(unfinished) + _scores(printed, color) + f'<p class="source">{escape(_SCORES)}</p>',
        ),
        Section(name="Figure", title="Side by side", html=figure(drawn, _BARS)),
        Section(name="Models", title="Models", html=_models(models)),
        Section(name="Notes", title="Notes", html=_notes(known["units"])),
        Section(name="Numbers", title="All numbers", html=details("All numbers", _numbers(rows)) if rows else ""),
        Section(name="Settings", title="Settings", html=details("Settings", tables.settings_table(known["settings"]))),
    ]
    return write_page(
        folder / PAGE,
        title="What the models can do",
        facts=[
            f"status: {known['status']}",
            f"{len(models)} model{'s' * (len(models) != 1)}",
            f"at most {limit} items per task" if limit else "",
            f"{seconds:,.0f} seconds",
            moment(known.get("created")),
        ],
        command=str(known.get("command") or ""),
        sections=sections,
    )


_SCORES = (
    "Shares (acc, acc_norm, exact_match, ...) in percent; ± is the sample standard deviation over the runs of an arm. "
    "The best number of each column is bold. Diverged, stuck and failed runs are left out and counted."
)
_BARS = "The shares of the table. Bars: mean over the runs; lines: sample standard deviation where there are several."


def _scores(printed: Json, color: dict[str, str]) -> str:
    rows = [{**line, "place": place} for place, line in enumerate(printed["lines"])]

    def cell(at: int) -> Field:
        best, single = printed["best"][at], len(rows) == 1
        best = best if isinstance(best, list) else [best]  # one, in older records

        def html(row: Row) -> str:
            mean, std = row["mean"][at], row["std"][at]
            if not _finite(mean):
                return NONE
            spread = f' <span class="spread">± {std:.2f}</span>' if _finite(std) else ""
            shown = f"<b>{mean:.2f}</b>" if row["place"] in best and not single else f"{mean:.2f}"
            return shown + spread

        return Field(title=printed["headings"][at], kind="number", cell=html)

    def runs(row: Row) -> str:
        reasons = "".join(f" {chip(str(reason), f'{count} {reason}')}" for reason, count in row["left_out"].items())
        return f"{row['runs']}{reasons}"

    fields = [
        Field(title="model", kind="name", cell=lambda row: named(str(row["arm"]), color)),
        Field(title="runs", cell=runs),
        *(cell(at) for at in range(len(printed["headings"]))),
    ]
    return Table(fields=fields, rows=rows, kind="ranking").html()


def _bars(printed: Json, color: dict[str, str]) -> go.Figure | None:
    """The shares as groups of bars; None where the table has none."""
    chosen = [at for at, share in enumerate(printed["shares"]) if share]
    if not chosen:
        return None
    drawn = go.Figure()
    for line in printed["lines"]:
        std = [line["std"][at] if _finite(line["std"][at]) else 0.0 for at in chosen]
        drawn.add_bar(
            x=[escape(printed["headings"][at]) for at in chosen],
            y=[line["mean"][at] for at in chosen],
            name=escape(line["arm"]),
            marker_color=color[line["arm"]],
            error_y={"type": "data", "array": std, "visible": any(std)},
        )
    drawn.update_layout(barmode="group")
    drawn.update_yaxes(title="percent", rangemode="tozero")
    return polish(drawn, 380)


def _models(models: list[Json]) -> str:
    fields = [
        text("name", "model", kind="name"),
        text("arm"),
        number("seed", ".0f"),
        Field(title="run", cell=lambda row: chip(str(row["status"]))),
        number("parameters", ",.0f"),
        text("path", kind="reason"),
    ]
    return Table(fields=fields, rows=models, kind="trials").html()


def _notes(units: list[Json]) -> str:
    notes = [{"model": unit["model"], "unit": unit["unit"], "note": note} for unit in units for note in unit["notes"]]
    fields = [text("model", kind="name"), text("unit", "task"), text("note", kind="reason")]
    return Table(fields=fields, rows=notes, kind="trials").html() if notes else ""


def _numbers(rows: list[Json]) -> str:
    fields = [
        text("model", kind="name"),
        text("task"),
        text("metric"),
        text("filter"),
        number("value", ".5g"),
        number("stderr", ".2g", "standard error"),
        number("items", ",.0f"),
        number("num_fewshot", ".0f", "examples"),
    ]
    return Table(fields=fields, rows=rows, kind="numbers").html()


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
