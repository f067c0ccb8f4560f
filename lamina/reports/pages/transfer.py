"""The page of a transfer: which learning rates hold on the proxy, and their values at the target."""

from __future__ import annotations

import json
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE, RESULTS, TRANSFER
from lamina.reports import sweeps, tables
from lamina.reports.mixture import refuse_other_experiments
from lamina.reports.page import Section, details, figure, moment, prose, write_page
from lamina.reports.pages.study import study_report
from lamina.reports.palette import PALETTE
from lamina.reports.records import Frame, read_study
from lamina.reports.registry import report_of
from lamina.reports.table import Field, Row, Table, chip, in_form, text
from lamina.studies.record import has_study

_FIGURE = (
    "Eval loss against the learning rate of the settings, before the factors of the width: with the right scaling, the "
    "curves of all widths have their minimum at the same rate. Marks along the top edge did not finish at that rate: "
    "triangle stuck, x diverged, cross failed, square interrupted, circle too short to tell."
)


@report_of(Kind.TRANSFER)
def transfer_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of a transfer; of one that was killed before it had numbers, the page of its trials.

    Raises UserError where its numbers are damaged.
    """
    folder = Path(folder)
    if not (folder / TRANSFER).exists() and has_study(folder):
        return study_report(folder)
    try:
        summary = json.loads((folder / TRANSFER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r}: no whole transfer ({' '.join(str(error).split())[:200]})") from None
    study = read_study(folder)
    refuse_other_experiments(study)
    by_width = _by_width(study.results, folder)
    order = list(dict.fromkeys(by_width["placement"]))
    color = {name: PALETTE[i % 4] for i, name in enumerate(order)}
    curves = sweeps.u_curves(by_width, color, order)
    trials = details(f"All {len(by_width)} trials", tables.trials_table(by_width, color))
    return write_page(
        folder / PAGE,
        title=f"Learning rates for {summary['placement']}: width {summary['proxy_width']} to {summary['target_width']}",
        facts=[
            f"width scaling {summary['width_scaling']}",
            str(study.settings.get("backbone", "")),
            f"{study.settings.get('steps', '')} steps",
            moment(study.header.get("created")),
        ],
        command=str(study.header.get("command") or ""),
        sections=[
            Section(name="Result", title="Result", html=prose(sentences(summary), {}) + _roles(summary)),
            Section(
                name="Learning rates",
                title="Learning rates",
                html=figure(curves, _FIGURE) + _rates(summary) + trials,
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


def sentences(summary: Row) -> list[str]:
    """Say a transfer's results: the intervals, the rate, its risk, and how the wider runs ended."""
    texts, proxy, target = [], summary["proxy_width"], summary["target_width"]
    if summary["learning_rate"] is None:
        return [f"No rate finished at width {proxy}, so there is none to carry over (try smaller ones, or more steps)."]
    low, high = summary["stable"]
    above = summary["first_failing_above"]
    texts.append(
        f"Stable at width {proxy}: {low:g} to {high:g}"
        + (
            f"; {above:g} is the first higher rate that does not finish."
            if above
            else "; the largest rate tried is stable."
        )
    )
    low, high = summary["best"]
    within = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    texts.append(f"Best at width {proxy}: {summary['learning_rate']:g} ({within} within the margin).")
    texts.append(f"Risk at width {target}: {summary['learning_rate']:g} is {summary['risk']}.")
    if summary["at_the_grids_edge"]:
        texts.append(
            "The best rate is the first or last that was tried: the true best may lie beyond (--learning-rates)."
        )
    for width, rates in summary["verified"].items():
        agreeing = [rate for rate in rates if rate["agrees"] is not None]
        same = sum(rate["agrees"] for rate in agreeing)
        if agreeing:
            texts.append(
                f"Verified at width {width}: {same} of {len(agreeing)} rates end as they did at width {proxy}."
            )
    return texts


def _by_width(results: Frame, folder: Path) -> Frame:
    """The results as the figures take them, one curve per width. complete() keeps unknown columns."""
    if "hidden_size" not in results:
        raise UserError(f"{str(folder / RESULTS)!r}: the column hidden_size is missing")
    return results.assign(placement=[f"width {width}" for width in results["hidden_size"]])


def _roles(summary: Row) -> str:
    if summary["learning_rate"] is None:
        return ""
    rows = [{"role": role, **numbers} for role, numbers in summary["roles"].items()]
    names = {"learning_rate": "learning rate", "weight_decay": "weight decay", "factor": "factor"}
    fields = [text("role", f"at width {summary['target_width']}")]
    fields += [_number(name, ".4g", title) for name, title in names.items()]
    return Table(fields=fields, rows=rows, kind="trials").html()


def _rates(summary: Row) -> str:
    fields = [
        _number("learning_rate", ".4g", "learning rate"),
        Field(title=f"at width {summary['proxy_width']}", cell=lambda row: chip(row["status"])),
        Field(title="eval loss", cell=lambda row: in_form(row["eval_loss"], ".4f", "–") + " best" * row["best"]),
        text("risk", "at another width"),
    ]
    return Table(fields=fields, rows=summary["rates"], kind="trials").html()


def _verified(summary: Row) -> str:
    rows = [{"width": width, **rate} for width, rates in summary["verified"].items() for rate in rates]
    agreement = {True: "yes", False: "no", None: "–"}
    fields = [
        text("width", kind="number"),
        _number("learning_rate", ".4g", "learning rate"),
        Field(title="there", cell=lambda row: chip(row["status"])),
        Field(title="on the proxy", cell=lambda row: chip(row["proxy"]) if row["proxy"] else "–"),
        _number("eval_loss", ".4f", "eval loss"),
        Field(title="the same end", cell=lambda row: agreement[row["agrees"]]),
    ]
    return Table(fields=fields, rows=rows, kind="trials").html() if rows else ""


def _number(name: str, form: str, title: str) -> Field:
    return Field(title=title, kind="number", cell=lambda row: in_form(row[name], form, "–"))
