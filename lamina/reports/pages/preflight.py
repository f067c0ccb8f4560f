"""The page of a preflight: verdicts, the reasons for them, and the measurements by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.jobs.names import LAYERS, PAGE, PREFLIGHT
from lamina.reports import charts
from lamina.reports.charts import Line
from lamina.reports.page import Section, figure, sentence, write_page
from lamina.reports.palette import colors
from lamina.reports.records import Frame, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import GREY, polish
from lamina.reports.table import Field, Row, Table, chip, number, swatch, text

_FIGURES = (
    ("jacobian_gain", "Cumulative Jacobian", "gain from x^l to x^N", (
        "Root mean square gain of the Jacobian from each state to the last one, before the first step and after the "
        "burn-in. Where it falls by many orders of magnitude toward the embedding (0), the early layers get no "
        "gradient; where it rises by as many, a small change in an early layer becomes a large one in the last."
    )),
    ("gradient_norm", "Backward: gradient of the weights", "gradient norm", (
        "Gradient norm of each block's weights on the held-out sequences, before clipping. Adam evens out differences "
        "of a few orders of magnitude; what lies below its epsilon does not learn."
    )),
    ("hidden_variance", "Forward: variance of the states", "variance", (
        "Variance of the stream behind each block (0: the embedding's output)."
    )),
    ("token_similarity", "Forward: similarity of tokens", "mean cosine", (
        "Mean cosine between the states of all pairs of tokens. At 1 all tokens look the same: nothing of the input "
        "reaches the layers above, and the model can only learn the tokens' frequencies."
    )),
)  # fmt: skip


@report_of(Kind.PREFLIGHT)
def preflight_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of its preflight.json and layers.parquet. Raises UserError where these aren't whole.

    preflight.json has the ``command`` line, the ``rows`` of the table of verdicts, one per planned run, and for each of
    them the ``losses`` of the burn-in's steps.
    """
    folder = Path(folder)
    try:
        known = json.loads((folder / PREFLIGHT).read_text(encoding="utf-8"))
        layers: Frame = pd.read_parquet((folder / LAYERS).absolute())
        return _page(folder, pd.DataFrame(known["rows"]), layers, known["losses"], str(known["command"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{str(folder)!r}: no whole preflight ({message})") from None


def _page(folder: Path, rows: Frame, layers: Frame, courses: list[list[float]], command: str) -> Path:
    records: list[Json] = [
        {name: math.nan if value is None else value for name, value in row.items()} for row in rows_of(rows)
    ]
    labels = [label_of(row["placement"], row["learning_rate"], rows) for row in records]
    color = colors(labels)
    losses = dict(zip(labels, courses, strict=True))
    first = records[0]
    sections = [Section(name="Verdict", title="Will it train?", html=_verdicts(records, labels, color))]
    for metric, title, quantity, caption in _FIGURES:
        drawn = _by_layer(rows, layers, metric, quantity, color)
        sections.append(Section(name=sentence(title.split(":")[-1].strip()), title=title, html=figure(drawn, caption)))
    sections.append(
        Section(
            name="Burn-in",
            title="Loss in the burn-in",
            html=figure(_losses(losses, first["unigram_loss"], color), _BURN_IN),
        )
    )
    sections.append(Section(name="Numbers", title="All numbers", html=_numbers(records, labels)))
    return write_page(
        folder / PAGE,
        title="Preflight: will it train?",
        facts=[
            f"{first['num_layers']} layers of width {first['hidden_size']}",
            f"{first['steps']} steps planned, {_span([int(row['burn_in_steps']) for row in records])} taken",
        ],
        command=command,
        sections=sections,
    )


_BURN_IN = (
    "Training loss of the steps taken. The dashed line is what a constant prediction with the tokens' frequencies "
    "reaches on the held-out sequences: a model that gets below it uses its input."
)


def _span(counts: list[int]) -> str:
    return str(min(counts)) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def label_of(placement: str, rate: float, rows: Frame) -> str:
    """The placement, with its learning rate if there are several."""
    return placement if rows["learning_rate"].nunique() == 1 else f"{placement} at {rate:g}"


def _verdicts(records: list[Json], labels: list[str], color: Mapping[str, str]) -> str:
    """Return a table of verdicts, with reasons and advice below it, since a phone hides a wide column of text."""
    reasons = []
    for row, label in zip(records, labels, strict=True):
        parts = {
            "": sentence(str(row["reason"])),
            "What to change: ": row["change"],
            "Note: ": row["note"],
            "Papers: ": row["advice"],
        }
        lines = "<br>".join(f"{name}{escape(str(part))}" for name, part in parts.items() if part)
        reasons.append(f"<p>{swatch(color[label])}<b>{escape(label)}</b> {chip(row['verdict'])}<br>{lines}</p>")
    fields = [
        Field(title="placement", kind="name", cell=lambda row: swatch(color[row["label"]]) + escape(row["placement"])),
        number("learning_rate", "g", "learning rate"),
        Field(title="verdict", cell=lambda row: chip(row["verdict"])),
        text("init"),
        Field(title="FP16 headroom", kind="number", cell=lambda row: f"{row['fp16_headroom']:.3g} ×"),
    ]
    rows = [{**row, "label": label} for row, label in zip(records, labels, strict=True)]
    return Table(fields=fields, rows=rows, kind="verdicts").html() + "".join(reasons)


def _numbers(records: list[Json], labels: list[str]) -> str:
    skipped = {"placement", "reason", "change", "advice", "note"}
    rows = [{"": name, **{str(i): row[name] for i, row in enumerate(records)}} for name in records[0]]
    fields = [text("", kind="name"), *(_any_number(str(i), label) for i, label in enumerate(labels))]
    return Table(fields=fields, rows=[row for row in rows if row[""] not in skipped], kind="trials").html()


def _any_number(name: str, title: str) -> Field:
    def cell(row: Row) -> str:
        return f"{row[name]:.4g}" if isinstance(row[name], float) else escape(str(row[name]))

    return Field(title=title, kind="number", cell=cell)


def _by_layer(rows: Frame, layers: Frame, metric: str, quantity: str, color: Mapping[str, str]) -> go.Figure:
    """A metric of the blocks against the layer, before the first step and at the last measurement, side by side."""
    drawn = charts.side_by_side(["before the first step", "after the burn-in"])
    chosen = layers[(layers["metric"] == metric) & (layers["sublayer"] == "block") & (layers["role"] == "all")]
    for key, own in chosen.groupby(["placement", "learning_rate"], sort=False):
        placement, rate = cast("tuple[str, float]", key)
        label = label_of(placement, rate, rows)
        for column, step in ((1, own["step"].min()), (2, own["step"].max())):
            points = own[own["step"] == step].sort_values("layer")
            values = points["value"].to_numpy(dtype=float)
            Line(
                x=points["layer"] + 1,
                y=np.where(np.isfinite(values) & (values > 0), values, math.nan),
                color=color[label],
                name=escape(label),
                group=label,
                legend=column == 1,
                hover=f"{escape(label)}: %{{y:.3g}}",
            ).draw(drawn, 1, column)
    has_embedding = len(chosen) > 0 and chosen["layer"].min() < 0
    drawn.update_xaxes(title="layer (0: the embedding)" if has_embedding else "layer")
    drawn.update_yaxes(title=quantity, row=1, col=1)
    drawn.update_layout(hovermode="x unified")
    polish(drawn, 420)
    if metric != "token_similarity":
        charts.log_axis(drawn)
    return charts.titles_above(drawn.update_layout(margin_t=84, legend_y=1.12))


def _losses(losses: Mapping[str, list[float]], unigram: float, color: Mapping[str, str]) -> go.Figure:
    drawn = go.Figure()
    for label, values in losses.items():
        Line(x=list(range(1, len(values) + 1)), y=values, color=color[label], name=escape(label)).draw(drawn)
    drawn.add_hline(y=unigram, line={"color": GREY, "width": 1.2, "dash": "dash"})
    drawn.update_xaxes(title="step")
    drawn.update_yaxes(title="loss (nats per token)")
    return polish(drawn, 380)
