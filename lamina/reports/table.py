"""The one HTML table of all pages, and its cells. Every text in it is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lamina.jobs.status import Status

Row = Mapping[str, Any]
NONE = '<span class="none">–</span>'  # for a missing number


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of a table.

    Attributes:
        title: its heading.
        cell: a row's cell as HTML: it escapes what users wrote.
        kind: the cells' CSS classes; a "number" is set to the right, its heading too.
    """

    title: str
    cell: Callable[[Row], str]
    kind: str = ""

    @property
    def heading(self) -> str:
        """The heading as HTML."""
        if not self.title:
            return "<td></td>"  # a heading without a word says nothing to a screen reader
        number = ' class="number"' if "number" in self.kind.split() else ""
        return f'<th scope="col"{number}>{escape(self.title)}</th>'

    def of_row(self, row: Row) -> str:
        """A row's cell with its tags."""
        kind = f' class="{self.kind}"' if self.kind else ""
        return f"<td{kind}>{self.cell(row)}</td>"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings; a table that is too wide scrolls sideways.

    Attributes:
        fields: the columns, from the left.
        rows: one mapping per row, which each field's ``cell`` reads.
        kind: the table's CSS class.
        row_kind: the CSS class of a row, "" for none.
    """

    fields: Sequence[Field]
    rows: Sequence[Row]
    kind: str
    row_kind: Callable[[Row], str] | None = None

    def html(self) -> str:
        """The table as HTML."""
        head = "".join(field.heading for field in self.fields)
        body = "".join(self._row(row) for row in self.rows)
        table = f'<table class="{self.kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'<div class="scroll">{table}</div>'

    def _row(self, row: Row) -> str:
        kind = self.row_kind(row) if self.row_kind is not None else ""
        cells = "".join(field.of_row(row) for field in self.fields)
        return f'<tr class="{kind}">{cells}</tr>' if kind else f"<tr>{cells}</tr>"


def text(name: str, title: str | None = None, kind: str = "") -> Field:
    """A column of texts: what ``name`` is in each row, escaped."""
    return Field(title=name if title is None else title, cell=lambda row: escape(str(row[name])), kind=kind)


def number(name: str, form: str, title: str | None = None, kind: str = "number") -> Field:
    """A column of numbers, printed as ``form`` says; a dash where one is missing or not finite."""
    return Field(title=name if title is None else title, cell=lambda row: in_form(row[name], form), kind=kind)


def in_form(value: object, form: str, missing: str = NONE) -> str:
    """A number in a format, or a dash where it is none or not finite."""
    return format(value, form) if isinstance(value, int | float) and math.isfinite(value) else missing


def swatch(color: str) -> str:
    """Return the dot in a placement's color before its name."""
    return f'<span class="swatch" style="background:{color}"></span>'


def named(placement: str, colors: Mapping[str, str]) -> str:
    """A placement's name behind its swatch."""
    return swatch(colors[placement]) + escape(placement)


# Words that pages set as a status, and the run's status whose color each has.
_CHIPS = {status.value: status.value for status in Status} | {
    "fine": "finished",
    "risky": "stuck",
    "undecided": "interrupted",
    "will not train": "diverged",
    "flat": "finished",
    "grows": "diverged",
    "shrinks": "stuck",
    "broken": "failed",
    "holds": "finished",
    "holds at iso-loss": "finished",
    "explained by loss": "short",
    "reversed": "diverged",
    "excluded": "diverged",
    "a part failed": "diverged",
    "fails": "diverged",
    "inconclusive": "stuck",
    "needs scale": "short",
    "not run yet": "interrupted",
}


def chip(word: str, label: str | None = None) -> str:
    """A status, or a verdict, as a small label; its class says how bad it is."""
    kind = _CHIPS.get(word, "failed" if word else "unknown")
    label = word if label is None else label
    return f'<span class="chip {kind}">{escape(label or "–")}</span>'
