"""Write the page of `lamina transfer`: learning rates that work on the small model, converted to the target width."""

from __future__ import annotations

from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULTS, TRANSFER
from lamina.reports import figures, sections, tables
from lamina.reports.page import Section, details, figure, moment, prose, write_page
from lamina.reports.pages.compare import RATES_BY_WIDTH, compare_report
from lamina.reports.records import read_study
from lamina.reports.registry import report_of
from lamina.reports.style import PALETTE
from lamina.reports.tables import Field, Row, chip, in_form, number, status, table, text
from lamina.studies.record import has_study


@report_of(Kind.TRANSFER, needs="transfer")
def transfer_report(folder: Path) -> Path:
    """Write the report of a learning-rate transfer study to ``folder/report.html``."""
    # before the study ends, compare the trials
    if not (folder / TRANSFER).exists() and has_study(folder):
        return compare_report(folder)
    study, summary = read_study(folder), read_json(folder / TRANSFER)
    if "hidden_size" not in study.results:  # complete() keeps unknown columns
        raise UserError(f"{str(folder / RESULTS)!r}: the column hidden_size is missing. Restore the original file.")
    by_width = study.results.assign(placement=[f"width {width}" for width in study.results["hidden_size"]])
    order = list(dict.fromkeys(by_width["placement"]))
    color = {name: PALETTE[i % 4] for i, name in enumerate(order)}
    rates = figure(figures.u_curves(by_width, color, order), RATES_BY_WIDTH) + _rates(summary)
    trials = details(f"All {len(by_width)} trials", tables.trials_table(by_width, color))
    return write_page(
        folder,
        title=headline(summary),
        facts=[
            f"width scaling {summary['width_scaling']}",
            str(study.settings.get("backbone", "")),
            f"{study.settings.get('steps', '')} steps",
            moment(study.header.get("created")),
        ],
        command=study.header.get("command"),
        sections=[
            Section("Result", "Result", prose(sentences(summary), {}) + _roles(summary)),
            Section("Learning rates", "Learning rates", rates + trials),
            Section("Verified", "The same learning rates at another width", _verified(summary)),
            sections.settings(study),
        ],
    )


def headline(summary: Row) -> str:
    rate = summary["learning_rate"]
    found = "no learning rate finished on the proxy" if rate is None else f"train at a learning rate of {rate:g}"
    return f"{summary['placement']}, width {summary['target_width']}: {found}"


def sentences(summary: Row) -> list[str]:
    """Return sentences about the stable and best learning rates, the risk, and the outcomes at other widths."""
    proxy, rate, above = summary["proxy_width"], summary["learning_rate"], summary["first_failing_above"]
    if rate is None:
        return [
            f"No learning rate finished at width {proxy}, so Lamina cannot convert a learning rate. Try smaller "
            "learning rates, or more steps."
        ]
    low, high = summary["stable"]
    failing = f"The run at {above:g} fails" if above else "The highest learning rate in the list is stable, too"
    stable = f"At a learning rate of {low:g}" if low == high else f"From a learning rate of {low:g} to {high:g}"
    texts = [f"{stable}, training is stable at width {proxy}. {failing}."]
    low, high = summary["best"]
    alike = "" if low == high else f", but the losses from {low:g} to {high:g} are too close to tell apart"
    texts.append(f"A learning rate of {rate:g} has the lowest loss at width {proxy}{alike}.")
    texts.append(f"Is {rate:g} safe at width {summary['target_width']}? It is {summary['risk']}.")
    if summary["at_the_grids_edge"]:
        texts.append(
            "The best learning rate is at the edge of the list, so a learning rate beyond the list may be better. Add "
            "values to --learning-rates."
        )
    for width, rates in summary["verified"].items():
        same = [rate["agrees"] for rate in rates if rate["agrees"] is not None]
        if same:
            texts.append(
                f"At width {width}, {sum(same)} of {len(same)} learning rates have the same outcome as at width "
                f"{proxy}."
            )
    return texts


def _roles(summary: Row) -> str:
    if summary["learning_rate"] is None:
        return ""
    rows = [{"role": _ROLES.get(role, role), **numbers} for role, numbers in summary["roles"].items()]
    names = ("learning_rate", "weight_decay", "factor")
    numbers = (number(name, ".4g", name.replace("_", " "), missing="–") for name in names)
    return table([text("role", f"at width {summary['target_width']}"), *numbers], rows, "trials")


def _rates(summary: Row) -> str:
    fields = [
        _RATE,
        status("status", f"at width {summary['proxy_width']}"),
        Field("eval loss", lambda row: in_form(row["eval_loss"], ".4f", "–") + " best" * row["best"]),
        text("risk", "at another width"),
    ]
    return table(fields, summary["rates"], "trials")


def _verified(summary: Row) -> str:
    rows = [{"width": width, **rate} for width, rates in summary["verified"].items() for rate in rates]
    agreement = {True: "yes", False: "no", None: "–"}
    fields = [
        text("width", kind="number"),
        _RATE,
        status("status", "there"),
        Field("on the proxy", lambda row: chip(row["proxy"]) if row["proxy"] else "–"),
        number("eval_loss", ".4f", "eval loss", missing="–"),
        Field("the same end", lambda row: agreement[row["agrees"]]),
    ]
    return table(fields, rows, "trials") if rows else ""


_ROLES = {"readout": "output head", "hidden": "matrices in the blocks", "vector": "gains and biases"}
_RATE = number("learning_rate", ".4g", "learning rate", missing="–")
