"""A diagnosis in sentences and as a page with the few figures that show it."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from lamina.reports import charts
from lamina.reports.charts import Line
from lamina.reports.diagnosing.advice import Cause, cause_of, jump_of, open_changes, studied
from lamina.reports.diagnosing.evidence import Evidence, gather, losses_of
from lamina.reports.diagnosing.jumps import Jump
from lamina.reports.metrics import METRICS
from lamina.reports.page import Section, figure, sentence, write_page
from lamina.reports.style import polish, to_html
from lamina.training.monitor.alarms import Alarm, describe

PAGE = "diagnosis.html"
_SHOWN = 12  # alarms
_COLORS = ("#b3261e", "#c98f1e", "#3d6fb4")


def diagnose(folder: Path) -> tuple[list[str], Path]:
    """Diagnose a run: sentences for the terminal, and the path of the page that was written.

    Raises UserError for a folder without records by layer, or with records of another version.
    """
    evidence = gather(folder)
    cause = cause_of(evidence)
    return sentences(evidence, cause), write(Path(folder), evidence, cause)


def sentences(evidence: Evidence, cause: Cause | None) -> list[str]:
    """What left first, in which layer and step, how early it could be seen, and what to change."""
    first, rose = evidence.first, evidence.rose
    texts = [_loss_sentence(evidence)]
    if first is None or cause is None:
        texts.append("No layer left its usual range in the records.")
        if rose is not None:
            texts.append("Record more often (every=1) to see what happens between two records.")
        return texts
    name = evidence.names.get(first.layer)
    texts.append(f"What left first: {describe(first)}{f', {name}' if name else ''}.")
    if evidence.lead is not None:
        texts.append(_lead_sentence(evidence.lead))
    then = _followers(evidence, first)
    if then:
        texts.append(f"Then: {'; '.join(describe(alarm) for alarm in then)}.")
    if (jump := jump_of(evidence)) is not None:
        texts.append(_jump_sentence(jump))
    texts.append(f"Likely cause: {cause.name}. {cause.meaning}")
    texts += [f"To change: {change}." for change in open_changes(cause, evidence.settings)]
    texts += [f"Lamina's own study: {line}" for line in studied(cause)]
    return texts


def _loss_sentence(evidence: Evidence) -> str:
    if evidence.rose is None:
        return f"The loss did not rise and stay up in {evidence.steps} steps (status: {evidence.status})."
    return f"The loss rose at step {evidence.rose} of {evidence.steps} (status: {evidence.status})."


def _lead_sentence(lead: int) -> str:
    if lead > 0:
        return f"It could have been seen {lead} step{'s' * (lead > 1)} before the loss rose."
    return "It was seen in the step in which the loss rose." if lead == 0 else "It was seen only after the loss rose."


def _jump_sentence(jump: Jump) -> str:
    return (
        f"Between steps {jump.start} and {jump.end} the norm of the weights of layer {jump.layer} "
        f"({jump.sublayer.replace('_', '-')}) went from {jump.before:.3g} to {jump.after:.3g}."
    )


def _followers(evidence: Evidence, first: Alarm) -> list[Alarm]:
    """The next alarms of other sub-layers, one each."""
    seen, chosen = {(first.layer, first.sublayer)}, []
    for alarm in evidence.alarms:
        place = (alarm.layer, alarm.sublayer)
        if alarm.step >= first.step and alarm.layer >= 0 and alarm.sublayer != "block" and place not in seen:
            seen.add(place)
            chosen.append(alarm)
    return chosen[:3]


def write(folder: Path, evidence: Evidence, cause: Cause | None) -> Path:
    """Write diagnosis.html."""
    texts = "".join(f"<p>{escape(text)}</p>" for text in sentences(evidence, cause))
    pictures = [_loss_figure(evidence)]
    captions = ["Training loss of every step. Red: where the loss rose; orange: the first alarm."]
    if evidence.first is not None:
        pictures.append(_series_figure(evidence, evidence.first))
        captions.append(
            f"{sentence(METRICS[evidence.first.metric].quantity)} of the sub-layer that left first, and of the same "
            "sub-layers of the other layers (gray)."
        )
    html = "".join(figure(to_html(p), escape(c)) for p, c in zip(pictures, captions, strict=True) if p is not None)
    listed = "".join(f"<li>{escape(describe(alarm))}</li>" for alarm in evidence.alarms[:_SHOWN])
    more = len(evidence.alarms) - _SHOWN
    listed += f"<li>and {more} more</li>" if more > 0 else ""
    return write_page(
        folder / PAGE,
        title=f"Diagnosis of {folder.resolve().name}",
        facts=[f"status: {evidence.status}", f"{len(evidence.alarms)} alarms"],
        command=f"lamina diagnose {folder}",
        sections=[
            Section(name="Diagnosis", title="What happened, and what to change", html=texts),
            Section(name="Figures", title="What shows it", html=html),
            Section(name="Alarms", title="Alarms by step", html=f"<ol>{listed}</ol>" if listed else ""),
        ],
    )


def _loss_figure(evidence: Evidence) -> go.Figure | None:
    losses = losses_of(evidence.trial)
    if not losses:
        return None
    picture = go.Figure()
    steps = sorted(losses)
    _draw(picture, steps, [losses[step] for step in steps], _COLORS[2], "loss")
    _marks(picture, evidence)
    return polish(picture.update_xaxes(title="step").update_yaxes(title="loss"), 340)


def _series_figure(evidence: Evidence, first: Alarm) -> go.Figure | None:
    rows = evidence.trial.layers
    rows = rows[(rows["metric"] == first.metric) & (rows["role"] == first.role) & (rows["index"] == 0)]
    rows = rows[rows["sublayer"] == first.sublayer]
    picture = go.Figure()
    for layer, group in sorted(rows.groupby("layer"), key=lambda pair: pair[0] == first.layer):
        group = group.sort_values("step")
        color = _COLORS[0] if layer == first.layer else "#b9bcc2"
        _draw(picture, group["step"].to_list(), group["value"].to_list(), color, f"layer {layer}")
    if not picture.data:
        return None
    _marks(picture, evidence)
    picture.update_xaxes(title="step").update_yaxes(title=METRICS[first.metric].quantity)
    picture.update_layout(showlegend=False)  # the caption says which is which, a layer's name stands at its points
    return charts.log_axis(polish(picture, 340))


def _draw(picture: go.Figure, steps: list[int], values: list[float], color: str, name: str) -> None:
    Line(
        x=np.asarray(steps),
        y=np.asarray(values, dtype=np.float32),
        color=color,
        width=1.6,
        name=name,
        hover=f"{name}, step %{{x}}: %{{y:.4g}}",
    ).draw(picture)


def _marks(picture: go.Figure, evidence: Evidence) -> None:
    for step, color in ((evidence.rose, _COLORS[0]), (evidence.first.step if evidence.first else None, _COLORS[1])):
        if step is not None:
            picture.add_vline(x=step, line={"color": color, "width": 1.2, "dash": "dash"})
