"""Write the pages of a diagnosis and of a comparison of two runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lamina.reports import charts
from lamina.reports.causes import rate_jump
from lamina.reports.charts import Line
from lamina.reports.diagnosis import Answer, Evidence, answer, headline
from lamina.reports.metrics import METRICS
from lamina.reports.page import Section, details, figure, prose, sentence, words, write_page
from lamina.reports.plotting import Figure
from lamina.reports.side_by_side import SeriesKey, SideBySide
from lamina.reports.style import polish, single
from lamina.training.monitor.alarms import Alarm, describe, events, in_words
from lamina.training.monitor.batches import beginning_of
from lamina.training.monitor.writers import LOSS, MODEL, NORM

PAGE = "diagnosis.html"
Drawn: TypeAlias = tuple[str, str, Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]
"""A line's name, color, steps and values."""
_SHOWN = 12  # alarms, and batches
_ROWS = 200  # of a batch
_POINTS, _NEAR = 1000, 100  # points of a line, and points on each side of the first anomaly
_FEW = 8  # below this number of steps, the axis has a tick at each step
_COLORS = ("#b3261e", "#c98f1e", "#3d6fb4")


def write_diagnosis(path: Path, evidence: Evidence, source: Path) -> Path:
    """Write the diagnosis of the run or log ``source`` as a page to ``path``."""
    said, html = answer(evidence), loss_chart(evidence)
    rates = _course(evidence, "learning rate", evidence.rates)
    if rate_jump(evidence) is not None:
        html, rates = rates + html, ""
    if (first := evidence.anomaly) is not None and first.metric != LOSS:
        others = " of the first sub-layer with an anomaly (red), and of the same sub-layer in other layers (gray)"
        caption = f"{sentence(_quantity(first))}{others if first.layer >= 0 else ' of the model'}."
        html += figure(_series_figure(evidence, first), escape(caption))
    norms = {step: value for step, layer, *_, value in evidence.rows([NORM]) if layer < 0}
    drawn = first is not None and first.metric == NORM
    html += details("Other recorded series", ("" if drawn else _course(evidence, "gradient norm", norms)) + rates)
    groups = events(evidence.alarms)
    listed = "".join(
        f"<li>{escape(evidence.in_units(describe(first, evidence.names)))}"
        f"{f' (and {len(others)} more series)' * bool(others)}</li>"
        for first, *others in groups[:_SHOWN]
    )
    more = len(groups) - _SHOWN
    listed += f"<li>and {more} more</li>" if more > 0 else ""
    title = "Cause, and what to change" if said.cause else "What Lamina found"
    return write_page(
        path.parent,
        name=path.name,
        title=headline(evidence),
        facts=[
            source.resolve().name,
            "" if evidence.imported else f"status: {evidence.status}",
            f"{len(groups)} alarm{'s' * (len(groups) != 1)}",
        ],
        command=f"lamina diagnose {source}",
        sections=[
            Section(name="Diagnosis", title=title, html=findings(said)),
            Section(name="Charts", title="What shows it", html=html),
            Section(name="Evidence", title="Evidence", html=_paragraphs(said.evidence if said.cause else [])),
            batches(evidence),
            Section(name="Notes", title="How far to trust the diagnosis", html=_paragraphs(said.notes)),
            Section(
                name="Alarms",
                title=f"Alarms by {evidence.unit}",
                html=details("All alarms", f"<ol>{listed}</ol>" if listed else ""),
            ),
        ],
    )


def findings(said: Answer) -> str:
    """Return the cause and a list of changes as HTML. If there is no cause, return the evidence and the changes."""
    todo = [sentence(text.removeprefix("To change: ")) for text in said.changes]
    advice = "".join(f"<li>{escape(text)}</li>" for text in todo)
    return prose(said.cause or said.evidence, {}, "finding") + (f"<ol>{advice}</ol>" if advice else "")


def batches(evidence: Evidence) -> Section:
    """Return the section about the recorded batches, with the beginning of each row."""
    html = ""
    for step, lines in [*evidence.batches.items()][:_SHOWN]:
        cells = "".join(
            f"<tr><td>{line['process']}</td><td>{line['row']}</td><td><code>{escape(str(line['hash']))}</code></td>"
            f"<td>{escape(beginning_of(line))}</td></tr>"
            for line in lines[:_ROWS]
        )
        head = "<tr><th>process</th><th>row</th><th>hash</th><th>beginning</th></tr>"
        html += details(f"step {step}: {len(lines)} rows", f"<table>{head}{cells}</table>")
    return Section(name="Batches", title="Batches that stood out", html=html)


def loss_chart(evidence: Evidence) -> str:
    """Draw the loss of every recorded step, with marks at the rise of the loss and at the first anomaly."""
    losses = evidence.losses
    marks = " The red line marks the rise of the loss." * (evidence.rise is not None)
    if (first := evidence.anomaly) is not None:
        apart = " The orange line marks the first anomaly (dotted)."
        marks += " The first anomaly is in the same step." if first.step == evidence.rise else apart
    course = _drawn(evidence, [("loss", _COLORS[2], *charts.series(losses))], "loss")
    return figure(course if losses else None, f"Training loss at every recorded step.{marks}")


def _course(evidence: Evidence, name: str, values: Mapping[int, float]) -> str:
    if len(values) < 2:
        return ""
    steps = sorted(values)
    drawn = _drawn(evidence, [(name, _COLORS[2], steps, [values[step] for step in steps])], name)
    return figure(drawn, f"{sentence(name)} that the run recorded.")


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def write_comparison(path: Path, compared: SideBySide) -> Path:
    """Write the comparison of two runs as a page to ``path``."""
    texts = _paragraphs(compared.sentences())
    parted = [part for part in (compared.whole, compared.layer) if part is not None]
    shown = [SeriesKey(*MODEL, LOSS), *(part.series for part in parted)]
    mark = " The red line marks the first difference." * bool(parted)
    html = ""
    for series in dict.fromkeys(series for series in shown if series in compared.series):
        layer, sublayer, _, metric = series
        where = f" at layer {layer} ({words(sublayer)})" if layer >= 0 else ""
        html += figure(_pair(compared, series), f"{sentence(in_words(metric))} of both runs{where}.{mark}")
    return write_page(
        path.parent,
        name=path.name,
        title=compared.title,
        facts=[*compared.names],
        command=f"lamina diagnose {' '.join(compared.names)}",
        sections=[
            Section(name="Comparison", title="Where the runs begin to differ", html=texts),
            Section(name="Figures", title="What shows it", html=html),
        ],
    )


def _pair(compared: SideBySide, series: SeriesKey) -> Figure:
    lines = [
        (name, color, sorted(values), [values[step] for step in sorted(values)])
        for name, color, values in zip(compared.names, _COLORS[1:], compared.series[series], strict=True)
    ]
    marks = ((compared.first.step, _COLORS[0]),) if compared.first is not None else ()
    return _lines(lines, in_words(series.metric).removeprefix("the "), marks, compared.unit)


def _quantity(alarm: Alarm) -> str:
    return METRICS[alarm.metric].quantity if alarm.metric in METRICS else alarm.metric.replace("_", " ")


def _series_figure(evidence: Evidence, first: Alarm) -> Figure | None:
    layers: dict[int, dict[int, float]] = {}
    for step, layer, sublayer, role, index, _, value in evidence.rows([first.metric], first.sublayer):
        if (sublayer, role, index) == (first.sublayer, first.role, 0):
            layers.setdefault(layer, {})[step] = value
    lines = []
    for layer, values in sorted(layers.items(), key=lambda pair: (pair[0] == first.layer, pair[0])):
        color = _COLORS[0] if layer == first.layer else "#b9bcc2"
        steps = sorted(values)
        at, every = bisect_left(steps, first.step), max(1, len(steps) // _POINTS)
        steps = sorted({*steps[::every], *steps[max(0, at - _NEAR) : at + _NEAR]})  # keep all points near the anomaly
        lines.append((f"layer {layer}", color, steps, [values[step] for step in steps]))
    if not lines:
        return None
    picture = _drawn(evidence, lines, _quantity(first))
    picture.update_layout(showlegend=False)  # the caption explains the colors, and the points show the layers' names
    return charts.log_axis(picture)


def _drawn(evidence: Evidence, lines: Sequence[Drawn], quantity: str) -> Figure:
    steps = ((evidence.anomaly.step if evidence.anomaly else None, _COLORS[1]), (evidence.rise, _COLORS[0]))
    return _lines(lines, quantity, [(step, color) for step, color in steps if step is not None], evidence.unit)


def _lines(lines: Sequence[Drawn], quantity: str, marks: Sequence[tuple[int, str]], unit: str = "step") -> Figure:
    picture = Figure()
    for name, color, steps, values in lines:
        Line(
            x=np.asarray(steps),
            y=single(values),
            color=color,
            width=1.6,
            name=name,
            hover=f"{name}, {unit} %{{x}}: %{{y:.4g}}",
        ).draw(picture)
    for step, color in marks:
        dash = "dot" if color == _COLORS[1] else "dash"
        picture.add_vline(x=step, line={"color": color, "width": 1.2, "dash": dash})
    few = max((max(steps) - min(steps) for _, _, steps, _ in lines if len(steps)), default=0) < _FEW
    picture.update_xaxes(title=unit, dtick=1 if few else None).update_yaxes(title=quantity, exponentformat="power")
    return polish(picture, 340)
