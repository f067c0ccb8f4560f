"""The page's tables. Every text in them is escaped here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lamina.jobs.status import Status, severity
from lamina.probes.spikes import FEWEST, SIGMAS, WINDOW
from lamina.reports.records import Frame, flatten, rows_of

# title: columns of the results
_SPIKES = {
    "loss spikes": ("loss_spikes", "loss_spike_score"),
    "gradient spikes": ("gradient_spikes", "gradient_spike_score"),
}

_SPIKE_NOTE = (
    f"A spike: a step whose training loss, or whose gradient norm before clipping, lies at least {SIGMAS:g} standard "
    f"deviations above the mean of the (up to) {WINDOW:,} steps before it or is not finite; the first {FEWEST} are "
    "not judged. Behind the count stands the spike score, the share of all steps (OLMo 2, arXiv 2501.00656, Sec 3.1)."
)


def ranking_table(summary: Frame, colours: Mapping[str, str]) -> str:
    """A row a placement at its best learning rate, best first."""
    head = ["", "placement", "status", "eval loss", "perplexity", "bits/byte", "learning rate", "init"]
    several, spiky = bool((summary["learning_rates"] > 1).any()), _with_spikes(summary)
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
            *(_spikes(row, name) for name in spiky),
            *(_cell(row[name], ",.0f") for name in ("tokens", "tokens_per_second", "seconds")),
        ]
        rows.append(f"<tr{unfinished}>{''.join(cells)}</tr>")
    head += [*spiky, "tokens", "tokens/s", "seconds"]
    right = {"eval loss", "perplexity", "bits/byte", head[6], *spiky, "tokens", "tokens/s", "seconds"}
    return html_table(head, rows, right, "ranking")


def trials_table(results: Frame, colours: Mapping[str, str]) -> str:
    """A row a trial, best first, with the reason of its status."""
    ordered = results.assign(order=[(severity(s) > 0) * (1 + severity(s)) for s in results["status"]])
    ordered = ordered.sort_values(["order", "eval_loss"], na_position="last", kind="stable")
    head = ["trial", "placement", "learning rate", "seed", "init", "status", "eval loss", "perplexity"]
    spiky = _with_spikes(results)
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
            *(_spikes(row, name) for name in spiky),
            *(_cell(row[name], ",.0f") for name in ("tokens", "steps", "seconds")),
            f'<td class="reason">{escape(row["reason"])}</td>',
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head += [*spiky, "tokens", "steps", "seconds", "reason"]
    right = {"learning rate", "seed", "eval loss", "perplexity", *spiky, "tokens", "steps", "seconds"}
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
    kind = status if status in set(Status) else "failed" if status else "unknown"
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


def spike_note(summary: Frame) -> str:
    """What counts as a spike, where a table counts them."""
    return f'<p class="source">{escape(_SPIKE_NOTE)}</p>' if _with_spikes(summary) else ""


def _with_spikes(table: Frame) -> list[str]:
    """The columns of spikes that a table has: none for runs that were too short, or older than the count."""
    return [name for name, (count, _) in _SPIKES.items() if count in table and table[count].notna().any()]


def _spikes(row: Mapping[str, Any], name: str) -> str:
    count, score = (row[column] for column in _SPIKES[name])
    if not math.isfinite(count):
        return _cell(count, "g")
    share = f' <span class="spread">{100 * score:.2g} %</span>' if count else ""
    return f'<td class="number">{count:.3g}{share}</td>'


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
