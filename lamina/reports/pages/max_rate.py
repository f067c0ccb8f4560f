"""The page of `lamina max-lr`: loss against learning rate, and where each placement failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE
from lamina.reports import charts, sections
from lamina.reports.charts import Line
from lamina.reports.max_rates import MaxRate, notices, spread, summarize
from lamina.reports.mixture import refuse_other_experiments
from lamina.reports.page import Section, callouts, figure, prose, write_page
from lamina.reports.palette import colors, look
from lamina.reports.records import Frame, Study, Trial, read_study, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import log_ticks, polish, thin
from lamina.reports.table import Field, Row, Table, chip, in_form, named, number, text
from lamina.training.monitor.max_rate_rules import NON_FINITE, NONE, PLATEAU, SPIKE, STUCK, smoothed

_POINTS = 400  # of a line
_MARKERS = {
    NON_FINITE: "x-thin-open",
    SPIKE: "triangle-up-open",
    PLATEAU: "square-open",
    STUCK: "circle-open",
    NONE: "triangle-right-open",
}


@report_of(Kind.MAX_LR)
def max_rate_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of a study of largest rates. Raises UserError where there is no result."""
    study = read_study(Path(folder))
    refuse_other_experiments(study)
    rows = summarize(study.results)
    color = colors(study.results["placement"])
    drawn = loss_by_rate(study, color)
    trials = Table(fields=_trial_fields(color), rows=rows_of(study.results), kind="trials").html()
    return write_page(
        study.folder / PAGE,
        title=f"How high a learning rate: {len(rows)} placement{'s' * (len(rows) > 1)}",
        facts=sections.facts(study),
        command=str(study.header.get("command") or ""),
        sections=[
            Section(
                name="Largest rates",
                title="The largest learning rate",
                html=prose(sentences(rows), color) + callouts(notices(rows)) + _table(rows, color),
            ),
            Section(
                name="Loss by rate",
                title="Loss against learning rate",
                html=figure(drawn, _FIGURE),
            ),
            Section(name="Trials", title="Every trial", html=trials),
            Section(name="Rules", title="The rules", html=prose(rules(study.settings), {})),
            sections.settings(study),
        ],
    )


def sentences(rows: Sequence[MaxRate]) -> list[str]:
    """Say in plain sentences which placement tolerates the highest rate, and its ratio to the lowest one."""
    measured = [row for row in rows if row.seeds and row.mean > 0]
    if not measured:
        return ["No trial has found its largest rate."]
    first, last = measured[0], measured[-1]
    least = "at least " if first.open else ""
    texts = [f"{first.placement} tolerates {least}{first.mean:.2g}."]
    if len(measured) > 1:
        than = f": {least}{first.mean / last.mean:.2g} times that of {last.placement} ({last.mean:.2g})"
        if last.open:
            than = f"; {last.placement} tolerates at least {last.mean:.2g}, so the ratio is unknown"
        texts[0] = f"{first.placement} tolerates the highest learning rate, {least}{first.mean:.2g}{than}."
    stuck = [row.placement for row in measured if row.ends == STUCK]
    return texts + [f"{name} never learned more than how often each token occurs." for name in stuck]


def rules(settings: Mapping[str, object]) -> list[str]:
    """The rules with this study's thresholds, in words."""
    value = {name: str(settings.get(name, "?")) for name in _THRESHOLDS}
    return [
        f"One linear warm-up from 0 to {value['max_learning_rate']} over {value['steps']} steps; all else as in "
        f"lamina pretrain. The smoothed loss is the mean of the last {value['window']} steps. A run stopped at the "
        "first of:",
        "non-finite: the loss of a step, or the gradient's norm, was not finite.",
        f"spike: the loss stayed more than {value['spike_margin']} nats above the lowest smoothed loss for "
        f"{_patience(value['spike_patience'])}. A loss that came back sooner is no spike.",
        f"plateau: the smoothed loss fell by less than {value['plateau_margin']} nats while the learning rate grew by "
        f"a factor of {value['plateau_factor']}. It is called stuck if the loss was not {value['stuck_margin']} nats "
        "below the corpus's unigram entropy.",
        "The largest rate is that of the last step before: the last at which the smoothed loss was at its low, for a "
        "plateau the one up to which it fell.",
    ]


def _patience(value: object) -> str:
    """Say --spike-patience in words: steps from 1 on, a share of all steps below 1."""
    number = float(str(value))
    return f"{number:g} steps" if number >= 1 else f"{100 * number:g} % of all steps"


def loss_by_rate(study: Study, color: Mapping[str, str]) -> go.Figure | None:
    """Smoothed loss against learning rate (log), one line per placement and seed, with a mark where each stopped."""
    picture, starts, lows, ends = go.Figure(), [], [], []
    named_in_legend: set[str] = set()
    for trial, row in zip(study.trials, rows_of(study.results), strict=True):
        curve = curve_of(trial, study.settings)
        if len(curve) < 2:
            continue
        label, own = escape(trial.placement), look(trial.placement)
        Line(
            x=curve["rate"].to_numpy(dtype=np.float32),
            y=curve["loss"].to_numpy(dtype=np.float32),
            color=color[trial.placement],
            dash=None if own is None or own.dash == "solid" else own.dash,
            name=label,
            data_name=f"{label}, seed {trial.seed:g}",
            group=label,
            legend=label not in named_in_legend,
            width=1.6,
            hover=f"{label}, seed {trial.seed:g}<br>%{{x:.3g}}: %{{y:.3f}}",
        ).draw(picture)
        named_in_legend.add(label)
        _mark(picture, row, color[trial.placement], label)
        starts.append(curve["loss"].iloc[0])
        lows.append(curve["loss"].min())
        ends.append(curve["rate"].agg(["min", "max"]).to_numpy())
    if not starts:
        return None
    low, high = min(lows), max(starts)
    left, right = min(e[0] for e in ends), max(e[1] for e in ends)
    entropy = study.results["unigram_entropy"].dropna()
    if len(entropy):
        charts.reference(picture, [left, right], float(entropy.iloc[0]), "unigram entropy")
    exponents, texts = log_ticks(math.log10(left), math.log10(right))
    picture.update_xaxes(
        type="log", title="learning rate", tickvals=[10**exponent for exponent in exponents], ticktext=texts
    )
    margin = 0.06 * (high - low)
    picture.update_yaxes(title="training loss (nats per token)", range=[low - margin, high + margin])
    return polish(picture, 460)


def curve_of(trial: Trial, settings: Mapping[str, object]) -> Frame:
    """A trial's smoothed loss by learning rate, without the first step, whose rate is 0: columns rate and loss."""
    rows = trial.layers[trial.layers["metric"] == "step_loss"].drop_duplicates("step", keep="last").sort_values("step")
    top, steps, window = (float(str(settings.get(name, 1))) for name in ("max_learning_rate", "steps", "window"))
    losses = smoothed(rows["value"].astype(float).to_numpy(), int(window))
    curve = rows[["step"]].assign(rate=top * (rows["step"].astype(float) - 1) / steps, loss=losses)
    return thin(curve[(curve["rate"] > 0) & np.isfinite(curve["loss"])], _POINTS)


def _mark(picture: go.Figure, row: Row, color: str, label: str) -> None:
    rule, rate, loss = row["stop_rule"], row["max_learning_rate"], row["loss_at_stop"]
    if not (rule and math.isfinite(loss) and rate > 0):
        return
    picture.add_scatter(
        x=[rate],
        y=[loss],
        mode="markers",
        marker={"symbol": _MARKERS.get(rule, "circle"), "size": 11, "color": color, "line": {"width": 2.2}},
        legendgroup=label,
        showlegend=False,
        meta={"line": f"{label}, seed {row['seed']:g}", "notes": [f"stopped by: {rule}"]},
        hovertemplate=f"{label}, seed {row['seed']:g}: {escape(rule)} after {rate:.3g}<extra></extra>",
    )


def _table(rows: Sequence[MaxRate], color: Mapping[str, str]) -> str:
    fields = [
        Field(title="placement", kind="name", cell=lambda row: named(row["row"].placement, color)),
        Field(title="largest learning rate", kind="number main", cell=lambda row: escape(spread(row["row"]))),
        Field(title="lowest", kind="number", cell=lambda row: in_form(row["row"].low, ".3g")),
        Field(title="highest", kind="number", cell=lambda row: in_form(row["row"].high, ".3g")),
        Field(title="seeds", kind="number", cell=lambda row: str(row["row"].seeds)),
        Field(title="loss there", kind="number", cell=lambda row: in_form(row["row"].loss, ".3f")),
        Field(title="stopped by", cell=lambda row: escape(row["row"].ends)),
    ]
    return Table(fields=fields, rows=[{"row": row} for row in rows], kind="ranking").html()


def _trial_fields(color: Mapping[str, str]) -> list[Field]:
    return [
        Field(title="placement", kind="name", cell=lambda row: named(row["placement"], color)),
        number("seed", ".0f"),
        Field(title="status", cell=lambda row: chip(row["status"])),
        number("max_learning_rate", ".3g", "largest learning rate"),
        text("stop_rule", "stopped by"),
        number("loss_at_stop", ".3f", "loss there"),
        number("steps", ",.0f"),
        number("seconds", ",.0f"),
        text("reason", kind="reason"),
    ]


_THRESHOLDS = (
    *("max_learning_rate", "steps", "window", "spike_margin", "spike_patience"),
    *("plateau_margin", "plateau_factor", "stuck_margin"),
)
_FIGURE = (
    "Training loss against the learning rate of the step, both rising from left to right: one line per placement and "
    "seed, smoothed. The mark is where a run failed: cross not finite, triangle a spike that stayed, square a plateau, "
    "circle stuck at the unigram entropy; a triangle to the right reached the end of the warm-up. Click a name to hide "
    "it."
)
