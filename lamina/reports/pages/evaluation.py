"""Write the page of an evaluation: the table of scores, a chart, and all numbers."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULT, RESULTS
from lamina.reports import tables
from lamina.reports.page import Section, callouts, details, figure, moment, write_page
from lamina.reports.plotting import Figure
from lamina.reports.records import is_number, read_table, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import GREY, colors, polish
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
    result, rows = read_json(folder / RESULT), rows_of(read_table(folder / RESULTS, _COLUMNS))
    printed, models, units = result["table"], result["models"], result["units"]
    color = colors([line["arm"] for line in printed["lines"]])
    limit = result["settings"].get("limit")
    unfinished = [f"{result['status']}: {result['reason']}"] if result["reason"] else []
    scores = callouts(unfinished) + _scores(printed, color) + f'<p class="source">{escape(_SCORES)}</p>'
    notes = [{**unit, "note": note} for unit in units for note in unit["notes"]]
    return write_page(
        folder,
        title=headline(printed, result.get("paired") or []),
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


def headline(printed: Json, paired: list[Json]) -> str:
    """Return the finding in one line, with the best score, the score of random guessing, and the significance."""
    known = [line for line in printed["lines"] if is_number(line["mean"][-1])]
    if not known:
        return "No model has a score"
    share, guessed = printed["shares"][-1], (printed.get("chance") or [None])[-1]
    best = max(known, key=lambda line: line["mean"][-1] * (1 if share else -1))
    heading = "on average" if printed["headings"][-1] == "Avg." else f"on {printed['headings'][-1]}"
    score = f"{best['mean'][-1]:.1f} %" if share else f"{best['mean'][-1]:.4g}"
    chance = f", guessing {guessed:.1f} %" if is_number(guessed) else ""
    if share and is_number(guessed) and best["mean"][-1] <= guessed:
        return f"No model beats random guessing {heading} ({best['arm']} {score}{chance})"
    if len(known) == 1:
        return f"{best['arm']} scores {score} {heading}{chance}"
    unsure = bool(paired) and all(row["p_holm"] is None or row["p_holm"] > 0.05 for row in paired)
    found = f"{best['arm']} scores {'highest' if share else 'lowest'} {heading} ({score}{chance})"
    return f"{found}, but no difference is significant" if unsure else found


_MODELS = (
    text("name", "model", kind="name"),
    text("arm", "setting"),
    number("seed", ".0f"),
    status("status", "run"),
    number("parameters", ",.0f"),
    text("path", kind="reason"),
)
_NOTES = (text("model", kind="name"), text("unit", "task"), text("note", kind="reason"))
_COLUMNS = ("model", "task", "metric", "filter", "value", "stderr", "items", "num_fewshot", "chance")
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
    "Scores from 0 to 1 (acc, acc_norm, exact_match, ...) are in percent. ± is the standard deviation over the runs. "
    "The best number of each column is bold. Lamina leaves out diverged, stuck and failed runs. The "
    "column “runs” also counts these runs."
)
GUESSING = "guessing"
_BARS = (
    "Each bar shows a score of the table in percent, averaged over the runs. A gray dash shows the score of random "
    "guessing. A thin line shows the sample standard deviation of several runs."
)


def _paired(rows: list[Json]) -> str:
    if not rows:
        return ""
    about = (
        f"Each row subtracts the score of {rows[0]['against']} from a model's score on the same items, with a 95 % "
        "interval. If every item is either right or wrong, the p value comes from McNemar's exact test. For other "
        "scores, the p value comes from a paired t test. Holm's method adjusts the p values over the tasks. The column "
        "“smallest to show” is the smallest difference that the test would detect with a probability of 80 %. With too "
        "few items, this column is empty."
    )
    return table(_PAIRED, rows, "trials") + f'<p class="source">{escape(about)}</p>'


def _scores(printed: Json, color: dict[str, str]) -> str:
    rows = [{**line, "place": index} for index, line in enumerate(printed["lines"])]
    chance = printed.get("chance") or []
    if any(map(is_number, chance)):
        nothing = {"runs": "", "left_out": {}, "std": [None] * len(chance)}
        rows.append({"arm": GUESSING, "place": -1, "mean": chance, **nothing})
        color = color | {GUESSING: GREY}

    def cell(at: int) -> Field:
        best = printed["best"][at]
        best = best if isinstance(best, list) else [best]  # older records have a number

        def html(row: Row) -> str:
            shown = in_form(row["mean"][at], ".2f")
            bold = row["place"] in best and len(printed["lines"]) > 1 and shown != NONE
            return with_spread(f"<b>{shown}</b>" if bold else shown, row["std"][at], ".2f")

        return Field(printed["headings"][at], html, "number")

    def runs(row: Row) -> str:
        reasons = "".join(f" {chip(str(reason), f'{count} {reason}')}" for reason, count in row["left_out"].items())
        return f"{row['runs']}{reasons}"

    scores = (cell(at) for at in range(len(printed["headings"])))
    fields = [placements(color, "arm", "model"), Field("runs", runs), *scores]
    return table(fields, rows, "ranking", lambda row: "unfinished" if row["arm"] == GUESSING else "")


def _bars(printed: Json, color: dict[str, str]) -> Figure | None:
    scored = [at for at, share in enumerate(printed["shares"]) if share]
    if not scored:
        return None
    chart = Figure()
    for line in printed["lines"]:
        std = [line["std"][at] if is_number(line["std"][at]) else 0.0 for at in scored]
        chart.add_bar(
            x=[escape(printed["headings"][at]) for at in scored],
            y=[line["mean"][at] for at in scored],
            name=escape(line["arm"]),
            marker={"color": color[line["arm"]]},
            error_y={"type": "data", "array": std, "visible": any(std)},
        )
    chance = printed.get("chance") or [None] * len(printed["headings"])
    levels = [at for at in scored if is_number(chance[at])]
    if levels:
        wide = min(46, 180 / len(scored))  # a column's width on a phone
        chart.add_scatter(
            x=[escape(printed["headings"][at]) for at in levels],
            y=[chance[at] for at in levels],
            mode="markers",
            name=GUESSING,
            marker={"symbol": "line-ew", "size": wide, "line": {"width": 2, "color": GREY}, "color": GREY},
        )
    bars = len(scored) * len(printed["lines"])
    chart.update_layout(barmode="group", bargap=max(0.2, 1 - 0.12 * bars))
    return polish(chart.update_xaxes(automargin=True).update_yaxes(title="percent", rangemode="tozero"), 380)
