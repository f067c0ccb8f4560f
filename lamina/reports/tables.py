"""The page's tables. Every text in them is escaped here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lamina.reports.ranking import STATUSES, severity
from lamina.reports.records import Frame, flatten, rows_of


def ranking_table(summary: Frame, colours: Mapping[str, str]) -> str:
    """A row a placement at its best learning rate, best first."""
    head = ["", "placement", "status", "eval loss", "perplexity", "bits/byte", "learning rate", "init"]
    several = bool((summary["learning_rates"] > 1).any())
    head[6] = "best learning rate" if several else "learning rate"
    rows = []
    for row in rows_of(summary):
        unfinished = "" if row["finished"] else ' class="unfinished"'
        cells = [
            f'<td class="rank">{int(row["rank"])}</td>',
            f'<td class="name">{swatch(colours[row["placement"]])}{escape(row["placement"])}</td>',
            f"<td>{chip(row['status'], row['status_text'])}</td>",
            f'<td class="number main">{_number(row["eval_loss"], ".3f")}{_spread(row["eval_loss_std"])}</td>',
            *(_cell(row[name], form) for name, form in (("perplexity", ".2f"), ("bits_per_byte", ".3f"))),
            _cell(row["learning_rate"], "g"),
            f"<td>{escape(row['init'])}</td>",
            *(_cell(row[name], ",.0f") for name in ("tokens", "tokens_per_second", "seconds")),
        ]
        rows.append(f"<tr{unfinished}>{''.join(cells)}</tr>")
    head += ["tokens", "tokens/s", "seconds"]
    right = {"eval loss", "perplexity", "bits/byte", head[6], "tokens", "tokens/s", "seconds"}
    return html_table(head, rows, right, "ranking")


def trials_table(results: Frame, colours: Mapping[str, str]) -> str:
    """A row a trial, best first, with the reason of its status."""
    ordered = results.assign(order=[(severity(s) > 0) * (1 + severity(s)) for s in results["status"]])
    ordered = ordered.sort_values(["order", "eval_loss"], na_position="last", kind="stable")
    head = ["trial", "placement", "learning rate", "seed", "init", "status", "eval loss", "perplexity"]
    rows = []
    for row in rows_of(ordered):
        cells = [
            f'<td class="name">{escape(row["trial"])}</td>',
            f'<td class="name">{swatch(colours[row["placement"]])}{escape(row["placement"])}</td>',
            _cell(row["learning_rate"], "g"),
            _cell(row["seed"], ".0f"),
            f"<td>{escape(row['init'])}</td>",
            f"<td>{chip(row['status'], row['status'])}</td>",
            _cell(row["eval_loss"], ".4f"),
            _cell(row["perplexity"], ".2f"),
            *(_cell(row[name], ",.0f") for name in ("tokens", "steps", "seconds")),
            f'<td class="reason">{escape(row["reason"])}</td>',
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head += ["tokens", "steps", "seconds", "reason"]
    right = {"learning rate", "seed", "eval loss", "perplexity", "tokens", "steps", "seconds"}
    return html_table(head, rows, right, "trials")


def settings_table(settings: Mapping[str, Any]) -> str:
    """Names and values in columns; nested settings with dotted names."""
    items = [
        f"<div><dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in flatten(dict(settings)).items()
    ]
    return f'<dl class="settings">{"".join(items)}</dl>'


def swatch(colour: str) -> str:
    """The dot in a placement's colour that stands before its name."""
    return f'<span class="swatch" style="background:{colour}"></span>'


def chip(status: str, text: str) -> str:
    """A status as a small label; its class says how bad it is."""
    kind = status if status in STATUSES else "failed" if status else "unknown"
    return f'<span class="chip {kind}">{escape(text or "–")}</span>'


def html_table(head: Sequence[str], rows: Sequence[str], right: set[str], name: str) -> str:
    """A table that scrolls sideways where it is too wide; ``rows`` is HTML, ``right`` names the columns of numbers."""
    cells = "".join(f'<th scope="col"{" class=number" if h in right else ""}>{escape(h)}</th>' for h in head)
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: float, form: str) -> str:
    return f'<td class="number">{_number(value, form)}</td>'


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else '<span class="none">–</span>'


def _spread(std: float) -> str:
    return f' <span class="spread">± {std:.3f}</span>' if math.isfinite(std) else ""


def _value(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
