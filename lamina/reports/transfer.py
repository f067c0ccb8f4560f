"""The page of a transfer: which learning rates hold on the proxy, and what they are at the target."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.reports import figures, tables
from lamina.reports.mixture import refuse_other_experiments
from lamina.reports.page import Section, details, figure, prose, write_page
from lamina.reports.records import Frame, read_study
from lamina.reports.style import to_html

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_FIGURE = (
    "Eval loss against the learning rate that was given, before the width's factors: under a right scaling the curves "
    "of all widths have their bottom at the same rate. Marks along the top edge did not finish at that rate: triangle "
    "stuck, x diverged, cross failed, square interrupted, circle too short to tell."
)


def transfer_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of a transfer. Raises UserError where its numbers are missing."""
    folder = Path(folder)
    try:
        summary = json.loads((folder / "transfer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r}: no whole transfer ({' '.join(str(error).split())[:200]})") from None
    study = read_study(folder)
    refuse_other_experiments(study)
    by_width = _by_width(study.results, folder)
    order = list(dict.fromkeys(by_width["placement"]))
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(order)}
    curves = figures.u_curves(by_width, colour, order)
    trials = details(f"All {len(by_width)} trials", tables.trials_table(by_width, colour))
    return write_page(
        folder / "report.html",
        title=f"Learning rates for {summary['placement']}: width {summary['proxy_width']} to {summary['target_width']}",
        facts=[
            f"width scaling {summary['width_scaling']}",
            str(study.settings.get("backbone", "")),
            f"{study.settings.get('steps', '')} steps",
            str(study.header.get("created") or ""),
        ],
        command=str(study.header.get("command") or ""),
        sections=[
            Section(name="Result", title="Result", html=prose(sentences(summary), {}) + _roles(summary)),
            Section(
                name="Learning rates",
                title="Learning rates",
                html=("" if curves is None else figure(to_html(curves), _FIGURE)) + _rates(summary) + trials,
            ),
            Section(name="Verified", title="The same rates at another width", html=_verified(summary)),
            Section(
                name="Settings",
                title="Settings and environment",
                html=details("Settings", tables.settings_table(study.settings))
                + details("Environment", tables.settings_table(study.environment)),
            ),
        ],
    )


def sentences(summary: dict[str, Any]) -> list[str]:
    """What a transfer found, in plain words: the intervals, the rate, how sure it is, what the wider runs said."""
    said, proxy, target = [], summary["proxy_width"], summary["target_width"]
    if summary["learning_rate"] is None:
        return [f"No rate finished at width {proxy}, so there is none to carry over (try smaller ones, or more steps)."]
    low, high = summary["stable"]
    above = summary["first_failing_above"]
    said.append(
        f"Stable at width {proxy}: {low:g} to {high:g}"
        + (f"; {above:g} is the first above that does not finish." if above else "; the largest tried is among them.")
    )
    low, high = summary["best"]
    within = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    said.append(f"Best at width {proxy}: {summary['learning_rate']:g} ({within} within the margin).")
    said.append(f"Risk at width {target}: {summary['learning_rate']:g} is {summary['risk']}.")
    if summary["at_the_grids_edge"]:
        said.append(
            "The best rate is the first or last that was tried: the true best may lie beyond (--learning-rates)."
        )
    for width, rates in summary["verified"].items():
        agreeing = [rate for rate in rates if rate["agrees"] is not None]
        same = sum(rate["agrees"] for rate in agreeing)
        if agreeing:
            said.append(f"Verified at width {width}: {same} of {len(agreeing)} rates end as they did at width {proxy}.")
    return said


def _by_width(results: Frame, folder: Path) -> Frame:
    """The results as the figures take them, a curve a width. complete() keeps the columns that it does not know."""
    if "hidden_size" not in results:
        raise UserError(f"{str(folder / 'results.csv')!r}: the column hidden_size is missing")
    return results.assign(placement=[f"width {width}" for width in results["hidden_size"]])


def _roles(summary: dict[str, Any]) -> str:
    if summary["learning_rate"] is None:
        return ""
    rows = [
        [escape(kind), _number(row["learning_rate"]), _number(row["weight_decay"]), _number(row["factor"])]
        for kind, row in summary["roles"].items()
    ]
    head = [f"at width {summary['target_width']}", "learning rate", "weight decay", "factor"]
    return table(head, rows, numbers=range(1, 4))


def _rates(summary: dict[str, Any]) -> str:
    rows = [
        [
            _number(rate["learning_rate"]),
            tables.chip(rate["status"], rate["status"]),
            _number(rate["eval_loss"], ".4f") + (" best" if rate["best"] else ""),
            escape(rate["risk"]),
        ]
        for rate in summary["rates"]
    ]
    return table(
        ["learning rate", f"at width {summary['proxy_width']}", "eval loss", "at another width"], rows, numbers=[0]
    )


def _verified(summary: dict[str, Any]) -> str:
    rows = [
        [
            escape(width),
            _number(rate["learning_rate"]),
            tables.chip(rate["status"], rate["status"]),
            tables.chip(rate["proxy"], rate["proxy"]) if rate["proxy"] else "–",
            _number(rate["eval_loss"], ".4f"),
            {True: "yes", False: "no", None: "–"}[rate["agrees"]],
        ]
        for width, rates in summary["verified"].items()
        for rate in rates
    ]
    head = ["width", "learning rate", "there", "on the proxy", "eval loss", "the same end"]
    return table(head, rows, numbers=[0, 1, 4]) if rows else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """A table of cells that are HTML already; ``numbers``: the columns that are set to the right."""
    right = [' class="number"' if i in numbers else "" for i in range(len(head))]
    top = "".join(f'<th scope="col"{c}>{escape(h)}</th>' for h, c in zip(head, right, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{c}>{cell}</td>' for cell, c in zip(row, right, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table class="trials"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None, form: str = ".4g") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)
