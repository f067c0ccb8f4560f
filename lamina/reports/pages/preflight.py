"""Write the page of a preflight: verdicts, reasons for the verdicts, and measurements by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import LAYERS, PREFLIGHT
from lamina.reports import charts
from lamina.reports.charts import Line
from lamina.reports.page import Section, details, figure, sentence, write_page
from lamina.reports.plotting import Figure
from lamina.reports.ranking import listed
from lamina.reports.records import Frame, read_table, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import colors
from lamina.reports.tables import Field, Row, chip, number, status, swatch, table, text

_FIGURES = (
    ("Cumulative Jacobian", (
        "The gain shows how strongly a small change in a layer's hidden state changes the last hidden state (root mean "
        "square gain of the Jacobian). If the gain falls by many orders of magnitude toward the embedding (-1), the "
        "early layers get no gradient. If the gain rises by many orders of magnitude, a small change in an early layer "
        "becomes a large change in the last layer."
    ), "jacobian_gain", "gain to the last layer"),
    ("Backward: gradient of the weights", (
        "Gradient norm of each block's weights on the held-out sequences, before clipping. Adam evens out "
        "differences of a few orders of magnitude, but weights with gradients below Adam's epsilon do not learn."
    ), "gradient_norm", "gradient norm"),
    ("Forward: variance of the states", (
        "Variance of the residual stream after each layer (-1: the embedding's output)."
    ), "hidden_variance", "variance"),
    ("Forward: similarity of tokens", (
        "Mean cosine between the hidden states of all pairs of tokens. If the cosine is 1, all tokens have the same "
        "hidden state. Later layers then no longer see the input, so the model can only learn the tokens' frequencies."
    ), "token_similarity", "mean cosine"),
)  # fmt: skip


_COLUMNS = ("placement", "learning_rate", "step", "layer", "sublayer", "role", "metric", "value")  # of layers.parquet


@report_of(Kind.PREFLIGHT, needs="preflight")
def preflight_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from preflight.json (a row and the losses of each run) and layers.parquet."""
    result, layers = read_json(folder / PREFLIGHT), read_table(folder / LAYERS, _COLUMNS)
    rows: Frame = pd.DataFrame(result["rows"])
    records: list[Json] = [
        {name: math.nan if value is None else value for name, value in row.items()} for row in rows_of(rows)
    ]
    labels = [label_of(row["placement"], row["learning_rate"], rows) for row in records]
    color = colors(labels)
    first = records[0]
    by_layer = [
        (title, figure(_by_layer(rows, layers, metric, quantity, color), caption))
        for title, caption, metric, quantity in _FIGURES
    ]
    folded = "".join(details(title, html) for title, html in by_layer[1:])
    steps = [int(row["burn_in_steps"]) for row in records]
    taken = str(min(steps)) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"
    lines = [
        Line(x=list(range(1, len(values) + 1)), y=values, color=color[label], name=escape(label))
        for label, values in zip(labels, result["losses"], strict=True)
    ]
    losses = charts.against("step", "loss (nats per token)", lines, 380)
    if losses is not None:
        charts.reference(losses, [1, max(steps)], first["unigram_loss"], "unigram entropy")
    return write_page(
        folder,
        title=headline(records, labels),
        facts=[
            f"{first['num_layers']} layers of width {first['hidden_size']}",
            f"{first['steps']} steps planned, {taken} taken",
        ],
        command=result["command"],
        sections=[
            Section("Verdict", "Will it train?", _verdicts(records, labels, color)),
            Section("Burn-in", "Loss in the burn-in", figure(losses, _BURN_IN)),
            Section("Jacobian", *by_layer[0]),
            Section("By layer", "More by layer", folded),
            Section("Numbers", "All numbers", details("All numbers", _numbers(records, labels))),
        ],
    )


def headline(records: list[Json], labels: list[str]) -> str:
    """Return the finding in one line: the only verdict, or the number of runs with the worst verdict."""
    if len(records) == 1:
        return f"{labels[0]}: {records[0]['verdict']}"
    bad = [label for label, row in zip(labels, records, strict=True) if row["verdict"] == "will not train"]
    if bad:
        return f"{len(bad)} of {len(records)} planned runs will not train: {listed(bad)}"
    open_runs = {label: row["verdict"] for label, row in zip(labels, records, strict=True) if row["verdict"] != "fine"}
    if not open_runs:
        return "All planned runs are fine"
    kinds = " or ".join(sorted(set(open_runs.values())))
    return f"{len(open_runs)} of {len(records)} planned runs are {kinds}: {listed([*open_runs])}"


_BURN_IN = (
    "Training loss in the burn-in. The dashed line is the held-out loss of a model that always predicts the "
    "tokens' frequencies. If a curve falls below this line, the model uses its input."
)


def label_of(placement: str, rate: float, rows: Frame) -> str:
    return placement if rows["learning_rate"].nunique() == 1 else f"{placement} at {rate:g}"


def _verdicts(records: list[Json], labels: list[str], color: Mapping[str, str]) -> str:
    reasons, cited = [], set()
    order = sorted(zip(records, labels, strict=True), key=lambda pair: pair[0]["chance"])
    for row, label in order:
        parts = {
            "": sentence(str(row["reason"])),
            "What to change: ": row["change"],
            "Note: ": row["note"],
            "Papers: ": "" if row["advice"] in cited else row["advice"],
        }
        cited.add(row["advice"])
        texts = [f"{name}{part}".rstrip(".") for name, part in parts.items() if part]
        lines = "<br>".join(f"{escape(text)}." for text in texts)
        reasons.append(f"<p>{swatch(color[label])}<b>{escape(label)}</b> {chip(row['verdict'])}<br>{lines}</p>")
    fields = [
        Field("placement", lambda row: swatch(color[row["label"]]) + escape(row["placement"]), "name"),
        number("learning_rate", "g", "learning rate"),
        status("verdict", "verdict"),
        *([text("init")] if len({row["init"] for row in records}) > 1 else []),
        number("fp16_headroom", ",.1f", "FP16 headroom (times)"),
    ]
    rows = [{**row, "label": label} for row, label in order]
    return table(fields, rows, "verdicts") + "".join(reasons)


def _numbers(records: list[Json], labels: list[str]) -> str:
    def cell(at: int, row: Row) -> str:
        value = row["values"][at]
        return f"{value:.4g}" if isinstance(value, float) else escape(str(value))

    shown = [name for name in records[0] if name not in ("placement", "reason", "change", "advice", "note")]
    rows = [{"name": name, "values": [record[name] for record in records]} for name in shown]
    numbers = (Field(label, partial(cell, at), "number") for at, label in enumerate(labels))
    return table([text("name", "", "name"), *numbers], rows, "trials")


def _by_layer(rows: Frame, layers: Frame, metric: str, quantity: str, color: Mapping[str, str]) -> Figure:
    """Draw a metric of whole blocks by layer. One panel shows the start, and one panel shows the last measurement."""
    chosen = layers[(layers["metric"] == metric) & (layers["sublayer"] == "block") & (layers["role"] == "all")]
    lines = []
    for key, run_rows in chosen.groupby(["placement", "learning_rate"], sort=False):
        label = label_of(*cast("tuple[str, float]", key), rows)
        for panel, step in ((1, run_rows["step"].min()), (2, run_rows["step"].max())):
            points = run_rows[run_rows["step"] == step].sort_values("layer")
            values = points["value"].to_numpy(dtype=float)
            line = Line(
                x=points["layer"],
                y=np.where(np.isfinite(values) & (values > 0), values, math.nan),
                color=color[label],
                name=escape(label),
                group=label,
                legend=panel == 1,
                hover=f"{escape(label)}: %{{y:.3g}}",
            )
            lines.append((panel, line))
    depth = "layer (-1: the embedding)" if len(chosen) > 0 and chosen["layer"].min() < 0 else "layer"
    titles = ("before the first step", "after the burn-in")
    return charts.in_panels(titles, lines, depth, quantity, log=metric != "token_similarity")
