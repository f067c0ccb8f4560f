"""Build HTML tables of results and of settings. This module escapes every text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from lamina.jobs.columns import RANKING, TRIALS, Column
from lamina.jobs.status import Status, severity
from lamina.probes.engine.spikes import FEWEST, SIGMAS, WINDOW
from lamina.reports.ranking import is_above_bigram, is_ranked
from lamina.reports.records import Frame, flatten, is_number, rows_of

Row = Mapping[str, Any]
NONE = '<span class="none">–</span>'  # for a missing number
ABOVE_BIGRAM = "above a bigram table"
_SPIKE_NOTE = (
    "A spike is a step at which the training loss or the gradient norm (before clipping) is far too large or not "
    f"finite. Far too large means at least {SIGMAS:g} standard deviations above the mean of up to {WINDOW:,} previous "
    f"steps. The first {FEWEST} steps do not count. The percentage after the count is the spike score: the number of "
    "spikes divided by the number of steps (OLMo 2, arXiv 2501.00656, Sec 3.1)."
)


@dataclass(frozen=True)
class Field:
    title: str
    cell: Callable[[Row], str]  # returns a row's cell as HTML, with users' texts escaped
    kind: str = ""  # the cells' CSS classes. Cells of the class "number" align to the right

    @property
    def heading(self) -> str:
        if not self.title:
            return "<td></td>"  # a heading without a word says nothing to a screen reader
        number = ' class="number"' if "number" in self.kind.split() else ""
        return f'<th scope="col"{number}>{escape(self.title)}</th>'


def table(
    fields: Sequence[Field], rows: Iterable[Row], kind: str, row_kind: Callable[[Row], str] = lambda row: ""
) -> str:
    """Return a table as HTML. ``kind`` is the CSS class of the table, and ``row_kind`` returns the class of a row."""

    def tag(name: str, kind: str, html: str) -> str:
        return f'<{name} class="{kind}">{html}</{name}>' if kind else f"<{name}>{html}</{name}>"

    head = tag("thead", "", tag("tr", "", "".join(field.heading for field in fields)))
    body = "".join(
        tag("tr", row_kind(row), "".join(tag("td", field.kind, field.cell(row)) for field in fields)) for row in rows
    )
    return tag("div", "scroll", tag("table", kind, head + tag("tbody", "", body)))


def text(name: str, title: str | None = None, kind: str = "") -> Field:
    """Return a column that shows the escaped text ``name`` of each row."""
    return Field(name if title is None else title, lambda row: escape(str(row[name])), kind)


def number(name: str, form: str, title: str | None = None, kind: str = "number", missing: str = NONE) -> Field:
    """Return a column of numbers in the format ``form``. ``missing`` replaces a value that is not a finite number."""
    return Field(name if title is None else title, lambda row: in_form(row[name], form, missing), kind)


def status(name: str, title: str) -> Field:
    return Field(title, lambda row: chip(str(row[name])))


def placements(colors: Mapping[str, str], name: str = "placement", title: str = "placement") -> Field:
    """Return a column of placement names. Each name has a colored dot in front."""
    return Field(title, lambda row: swatch(colors[row[name]]) + escape(str(row[name])), "name")


def in_form(value: object, form: str, missing: str = NONE) -> str:
    """Format a number. A value that is not a finite number becomes ``missing``, which is a dash by default."""
    return format(value, form) if is_number(value) else missing


def with_spread(value: str, std: object, form: str) -> str:
    return f'{value} <span class="spread">± {std:{form}}</span>' if is_number(std) else value


def swatch(color: str) -> str:
    return f'<span class="swatch" style="background:{color}"></span>'


# Each verdict has the color of a run's status.
_WORDS = {
    "finished": ("fine", "flat", "holds", "holds at iso-loss"),
    "short": ("explained by loss", "needs scale"),
    "stuck": ("risky", "shrinks", "inconclusive"),
    "interrupted": ("undecided", "not run yet"),
    "diverged": ("will not train", "grows", "reversed", "excluded", "a part failed", "fails"),
    "failed": ("broken",),
}
_CHIPS = {word: status.value for status in Status for word in (status.value, *_WORDS.get(status.value, ()))}


def chip(word: str, label: str | None = None) -> str:
    """Return a status or a verdict as a small label. The label's CSS class shows how bad the status is."""
    kind = _CHIPS.get(word, "failed" if word else "unknown")
    label = word if label is None else label
    return f'<span class="chip {kind}">{escape(label or "–")}</span>'


def ranking_table(summary: Frame, colors: Mapping[str, str]) -> str:
    """Return the ranking as a table. A column with equal values for all placements moves to a folded list below."""
    several = bool((summary["learning_rates"] > 1).any())
    fields = [Field("", lambda row: in_form(row["rank"], ".0f"), "rank")]
    for column in _present(RANKING, summary):
        if column.name == "status":
            fields.append(Field(column.title, _status))
        elif column.name == "eval_loss":
            fields.append(Field(column.title, _loss, "number main"))
        elif column.name == "learning_rate" and several:
            fields.append(number("learning_rate", "g", "best learning rate"))
        else:
            fields.append(_field(column, colors))
    rows = rows_of(summary)
    common = [field for field in fields[1:] if len(rows) > 1 and len({field.cell(row) for row in rows}) == 1]
    shown = [field for field in fields if field not in common]
    alike = "".join(f"<div><dt>{escape(field.title)}</dt><dd>{field.cell(rows[0])}</dd></div>" for field in common)
    summed = f"<summary>The same for all {len(rows)} placements</summary>"
    folded = f'<details>{summed}<dl class="settings">{alike}</dl></details>'
    html = table(shown, rows, "ranking", lambda row: "" if is_ranked(dict(row)) else "unfinished")
    return html + folded * bool(common)


def trials_table(results: Frame, colors: Mapping[str, str]) -> str:
    """Return the table of all trials, sorted by status and then by eval loss."""
    ordered = results.assign(order=[severity(word) for word in results["status"]])
    ordered = ordered.sort_values(["order", "eval_loss"], na_position="last", kind="stable")
    return table([_field(column, colors) for column in _present(TRIALS, results)], rows_of(ordered), "trials")


def _present(columns: Iterable[Column], frame: Frame) -> list[Column]:
    return [c for c in columns if not c.optional or (c.name in frame and frame[c.name].notna().any())]


def _field(column: Column, colors: Mapping[str, str]) -> Field:
    if column.name == "placement":
        return placements(colors, title=column.title)
    if column.name == "status":
        return status("status", column.title)
    if column.share is not None:
        return Field(column.title, partial(_with_share, column, column.share), "number")
    if column.format is not None:
        return number(column.name, column.format, column.title)
    return text(column.name, column.title, {"trial": "name", "reason": "reason"}.get(column.name, ""))


def _status(row: Row) -> str:
    above = " " + chip("stuck", ABOVE_BIGRAM) if row["finished"] and is_above_bigram(dict(row)) else ""
    return chip(row["status"], row["status_text"]) + above


def _loss(row: Row) -> str:
    return with_spread(in_form(row["eval_loss"], ".3f"), row["eval_loss_std"], ".3f")


def _with_share(column: Column, share: str, row: Row) -> str:
    """Return a count with the matching percentage as HTML."""
    count = row[column.name]
    part = f' <span class="spread">{100 * row[share]:.2g} %</span>' if math.isfinite(count) and count else ""
    return in_form(count, column.format or "") + part


def settings_table(settings: Mapping[str, object]) -> str:
    """Return settings as a list of names and values in HTML. Nested settings have dotted names."""
    items = [
        f"<div><dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in flatten(dict(settings)).items()
    ]
    return f'<dl class="settings">{"".join(items)}</dl>'


def spike_note(summary: Frame) -> str:
    return f'<p class="source">{escape(_SPIKE_NOTE)}</p>' if any(c.share for c in _present(RANKING, summary)) else ""


def _value(value: object) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
