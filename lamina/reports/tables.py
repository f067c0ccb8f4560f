"""The tables of results and of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape

from lamina.jobs.columns import RANKING, TRIALS, Column
from lamina.jobs.status import severity
from lamina.probes.engine.spikes import FEWEST, SIGMAS, WINDOW
from lamina.reports.ranking import is_above_bigram, is_ranked
from lamina.reports.records import Frame, flatten, rows_of
from lamina.reports.table import Field, Row, Table, chip, in_form, named, number, text

ABOVE_BIGRAM = "above a bigram table"
_SPIKE_NOTE = (
    f"A spike: a step whose training loss, or whose gradient norm before clipping, lies at least {SIGMAS:g} standard "
    f"deviations above the mean of the (up to) {WINDOW:,} steps before it or is not finite; the first {FEWEST} are "
    "not judged. Behind the count stands the spike score, the share of all steps (OLMo 2, arXiv 2501.00656, Sec 3.1)."
)


def ranking_table(summary: Frame, colors: Mapping[str, str]) -> str:
    """The placements, each at its best learning rate, best first."""
    several = bool((summary["learning_rates"] > 1).any())
    fields = [Field(title="", kind="rank", cell=lambda row: in_form(row["rank"], ".0f"))]
    for column in _present(RANKING, summary):
        if column.name == "status":
            fields.append(Field(title=column.title, cell=_status))
        elif column.name == "eval_loss":
            fields.append(Field(title=column.title, cell=_loss_with_spread, kind="number main"))
        elif column.name == "learning_rate" and several:
            fields.append(number("learning_rate", "g", "best learning rate"))
        else:
            fields.append(_field(column, colors))
    unranked = {True: "", False: "unfinished"}
    return Table(
        fields=fields, rows=rows_of(summary), kind="ranking", row_kind=lambda row: unranked[is_ranked(dict(row))]
    ).html()


def trials_table(results: Frame, colors: Mapping[str, str]) -> str:
    """All trials, best first, with the reason of each one's status."""
    ordered = results.assign(order=[(severity(s) > 0) * (1 + severity(s)) for s in results["status"]])
    ordered = ordered.sort_values(["order", "eval_loss"], na_position="last", kind="stable")
    fields = [_field(column, colors) for column in _present(TRIALS, results)]
    return Table(fields=fields, rows=rows_of(ordered), kind="trials").html()


def _present(columns: Iterable[Column], table: Frame) -> list[Column]:
    """Return the columns without the optional ones that ``table`` has no value for (short or older runs)."""
    return [c for c in columns if not c.optional or (c.name in table and table[c.name].notna().any())]


def _field(column: Column, colors: Mapping[str, str]) -> Field:
    """A result's column as one of a page's table."""
    if column.name == "placement":
        return Field(title=column.title, kind="name", cell=lambda row: named(row["placement"], colors))
    if column.name == "status":
        return Field(title=column.title, cell=lambda row: chip(row["status"]))
    if column.share is not None:
        return Field(title=column.title, kind="number", cell=_with_share(column, column.share))
    if column.format is not None:
        return number(column.name, column.format, column.title)
    return text(column.name, column.title, {"trial": "name", "reason": "reason"}.get(column.name, ""))


def _status(row: Row) -> str:
    above = " " + chip("stuck", ABOVE_BIGRAM) if row["finished"] and is_above_bigram(dict(row)) else ""
    return chip(row["status"], row["status_text"]) + above


def _loss_with_spread(row: Row) -> str:
    spread = f' <span class="spread">± {row["eval_loss_std"]:.3f}</span>' if math.isfinite(row["eval_loss_std"]) else ""
    return in_form(row["eval_loss"], ".3f") + spread


def _with_share(column: Column, share: str) -> Callable[[Row], str]:
    """Print a count and the share that it is of all, in percent."""

    def cell(row: Row) -> str:
        count = row[column.name]
        part = f' <span class="spread">{100 * row[share]:.2g} %</span>' if math.isfinite(count) and count else ""
        return in_form(count, column.format or "") + part

    return cell


def settings_table(settings: Mapping[str, object]) -> str:
    """Names and values in columns; nested settings with dotted names."""
    items = [
        f"<div><dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in flatten(dict(settings)).items()
    ]
    return f'<dl class="settings">{"".join(items)}</dl>'


def spike_note(summary: Frame) -> str:
    """Explain what counts as a spike, if a table counts them."""
    return f'<p class="source">{escape(_SPIKE_NOTE)}</p>' if any(c.share for c in _present(RANKING, summary)) else ""


def _value(value: object) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
