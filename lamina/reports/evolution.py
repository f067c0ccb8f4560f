"""The results of scheduled probes in training: one section per probe, for one run or all placements of a study."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from lamina.core.json_types import Json
from lamina.jobs.names import ABOUT, NOTES
from lamina.reports import charts, depth
from lamina.reports.charts import Grid, Line
from lamina.reports.page import Section, callouts, figure, sentence
from lamina.reports.records import Frame, Trial
from lamina.reports.style import Shown, polish, to_html

_BY_DEPTH = ("layer", "size", "distance")  # possible x axes; the first that a frame has is used
_TEXTS = ("metric", "sublayer", "role", "format", "meaning")  # columns that tell measurements apart
_WHOLE = ("model", "block", "state", "all", "jacobian", "", None)  # values for a whole layer
_LINES, _QUANTITIES = 7, 6  # steps per panel, quantities per probe


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One of a probe's measurements as a table by depth and step: the rows in which these columns have these values."""

    probe: str
    by: str
    fixed: tuple[tuple[str, Any], ...]
    log: bool

    @property
    def label(self) -> str:
        """Its name on the axes."""
        values = {k: str(v).replace("_", " ") for k, v in self.fixed}
        silent = ("all", "model", "block", "", "None", "nan")
        rest = [v for k, v in values.items() if k not in ("metric", "index") and v not in silent]
        if rest and (number := float(values.get("index", 0))) > 0:
            rest[-1] += f" {number + 1:g}"  # the second of several norms
        name = values.get("metric", self.probe.replace("_", " "))
        return name + (f" ({', '.join(rest)})" if rest else "")

    def table(self, trial: Trial) -> Frame:
        """One row per layer (or distance), one column per step; several values of one place are averaged."""
        rows = trial.probes.get(self.probe, pd.DataFrame())
        for column, value in self.fixed:
            if column not in rows:
                return pd.DataFrame()
            rows = rows[rows[column].isna() if pd.isna(value) else rows[column] == value]
        if rows.empty or self.by not in rows:
            return pd.DataFrame()
        rows = rows[rows[self.by] >= 0]
        return rows.pivot_table(index=self.by, columns="step", values="value", aggfunc="mean").astype(float)


def sections(items: Sequence[Shown]) -> list[Section]:
    """One section per probe that ran on any of these trials."""
    names = sorted({name for item in items for trial in item.trials for name in trial.probes})
    return [section for name in names if (section := _section(name, items)).html]


def quantities(name: str, frame: Frame, chosen: Sequence[str] = ()) -> list[Quantity]:
    """The quantities of a frame that can be drawn by depth: all metrics, or those ``chosen``; whole layers first."""
    by = next((column for column in _BY_DEPTH if column in frame), None)
    if by is None or frame.empty:
        return []
    several_norms = ("index",) if "path" in frame else ()  # each row names its module
    keys = [k for k in (*_TEXTS, *several_norms) if k in frame and frame[k].notna().any()]
    ranked = []
    for key, rows in frame[frame[by] >= 0].groupby(keys, sort=False, dropna=False) if keys else [((), frame)]:
        along = "start" if by == "size" and rows[by].nunique() < 2 and "start" in rows else by
        if rows[along].nunique() < 2:
            continue
        fixed = dict(zip(keys, key if isinstance(key, tuple) else (key,), strict=True))
        if "index" in rows and rows["index"].nunique() > 1:  # the largest of top-k
            fixed["index"] = rows["index"].min()
            rows = rows[rows["index"] == fixed["index"]]
        values: Frame = pd.to_numeric(rows["value"], errors="coerce")
        values = values[np.isfinite(values)]
        log = bool(len(values)) and values.min() > 0 and values.max() > 8 * values.min()
        metric = fixed.get("metric")
        if chosen and metric not in chosen:
            continue
        whole = fixed.get("sublayer") in _WHOLE and fixed.get("role") in _WHOLE
        rank = (not whole, chosen.index(metric) if chosen else 0)
        ranked.append((rank, Quantity(probe=name, by=along, fixed=tuple(fixed.items()), log=log)))
    return [quantity for _, quantity in sorted(ranked, key=lambda pair: pair[0])]


class Drawable(Protocol):
    """A quantity to draw against depth: its name on the axes, what depth counts, whether logarithmic, and its table."""

    @property
    def label(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def log(self) -> bool: ...
    def table(self, trial: Trial) -> Frame: ...


def by_steps(items: Sequence[Shown], quantity: Drawable) -> go.Figure | None:
    """``quantity`` against depth, one line for each of a few steps (Peri-LN Fig 1, 6): one panel per placement."""
    drawn = [(item, depth.over_seeds(item, quantity.table, log=quantity.log)) for item in items]
    drawn = [(item, table) for item, table in drawn if not table.empty]
    if not drawn:
        return None
    every = sorted({step for _, table in drawn for step in table.columns})
    steps = [every[i] for i in sorted({round(i) for i in np.linspace(0, len(every) - 1, min(len(every), _LINES))})]
    shades = sample_colorscale("Viridis", [0.92 * (1 - i / max(1, len(steps) - 1)) for i in range(len(steps))])
    grid = Grid(len(drawn))
    picture = make_subplots(
        rows=grid.down,
        cols=grid.across,
        shared_yaxes="all",  # pyright: ignore[reportArgumentType]
        shared_xaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=0.16 / grid.down,
        subplot_titles=[item.label for item, _ in drawn] if len(items) > 1 else None,
    )
    for number, (_, table) in enumerate(drawn):
        row, col = grid.place(number)
        for step, shade in zip(steps, shades, strict=True):
            if step in table:
                _at_step(table, step, str(shade), quantity.by, legend=number == 0).draw(picture, row, col)
        picture.update_yaxes(title=quantity.label if col == 1 else None, row=row, col=col)
        if grid.lowest(number):
            picture.update_xaxes(title=quantity.by, showticklabels=True, row=row, col=col)
    if quantity.log:
        picture.update_yaxes(type="log")
    polish(picture, 400 if grid.down == 1 else 220 * grid.down + 90)
    picture = charts.log_axis(picture) if quantity.log else picture
    legend_y = 1.06 if grid.down == 1 else 1 + 0.13 / grid.down
    picture.update_layout(margin_t=72 if len(items) > 1 else 52, legend_y=legend_y)
    return charts.titles_above(picture)


def _at_step(table: Frame, step: float, shade: str, by: str, *, legend: bool) -> Line:
    """One step's values against the depth."""
    return Line(
        x=table.index.to_numpy(),
        y=table[step].to_numpy(dtype=np.float32),
        color=shade,
        name=f"step {step:g}",
        group=str(step),
        legend=legend,
        markers=len(table) <= 16,
        marker=5,
        hover=f"step {step:g}, {by} %{{x}}: %{{y:.4g}}",
    )


def over_steps(items: Sequence[Shown], frames: dict[str, Frame], name: str) -> go.Figure | None:
    """A probe's numbers for the whole model (layer -1, or no layer at all), over the steps: one panel per metric."""
    numbers: dict[str, list[tuple[Shown, Frame]]] = {}
    for item in items:
        rows = frames.get(item.placement, pd.DataFrame())
        if rows.empty or any(column in rows for column in _BY_DEPTH[1:]):
            continue
        rows = rows[rows["layer"] < 0] if "layer" in rows else rows
        keys = [k for k in ("metric", "sublayer", "role", "index") if k in rows and rows[k].nunique() > 0]
        for key, group in rows.groupby(keys, sort=False) if keys else [((), rows)]:
            if group["step"].nunique() > 1:
                columns = dict(zip(keys, key if isinstance(key, tuple) else (key,), strict=True))
                columns.pop("index", None)
                label = Quantity(probe=name, by="step", fixed=tuple(columns.items()), log=False).label
                numbers.setdefault(label, []).append((item, group.groupby("step", as_index=False)["value"].mean()))
    if not numbers:
        return None
    labels = sorted(numbers, key=lambda label: "(" in label)[:_QUANTITIES]  # the whole model's before its parts
    picture = make_subplots(rows=1, cols=len(labels), horizontal_spacing=0.08)
    named: set[str] = set()
    for number, label in enumerate(labels, start=1):
        for item, rows in numbers[label]:
            Line(
                x=rows["step"],
                y=rows["value"].to_numpy(dtype=np.float32),
                color=item.color,
                dash=item.dash,
                name=item.label,
                group=item.label,
                legend=len(items) > 1 and item.placement not in named,
                markers=True,
                hover="step %{x}: %{y:.4g}",
            ).draw(picture, 1, number)
            named.add(item.placement)
        picture.update_yaxes(title=label, row=1, col=number)
    picture.update_xaxes(title="step")
    picture.update_yaxes(exponentformat="power")
    return polish(picture, 320)


def _section(name: str, items: Sequence[Shown]) -> Section:
    facts = next((facts for item in items for t in item.trials if (facts := _about(t.folder, name))), {})
    frames = {
        item.placement: pd.concat(tables)
        for item in items
        if (tables := [f for trial in item.trials if len(f := trial.probes.get(name, pd.DataFrame()))])
    }
    html = callouts(_notes(name, items))
    if frames:
        everything: Frame = pd.concat(frames.values(), ignore_index=True)
        found = quantities(name, everything, tuple(facts.get("over_steps") or ()))
        drawn = found[:_QUANTITIES]
        for quantity in drawn:
            lines, maps = by_steps(items, quantity), None
            if everything["step"].nunique() > 2:
                maps = depth.heat_maps(items, quantity.table, quantity.label, log=quantity.log, upwards=quantity.by)
            if lines is not None:
                html += figure(to_html(lines), _LINES_CAPTION, quantity.label.capitalize())
            if maps is not None:
                html += figure(to_html(maps), _MAPS_CAPTION.format(by=quantity.by))
        if len(found) > len(drawn):
            left = ", ".join(quantity.label for quantity in found[len(drawn) :])
            html += callouts([f"{len(drawn)} of {len(found)} quantities are drawn. In the folder only: {left}."])
        numbers = over_steps(items, frames, name)
        if numbers is not None:
            html += figure(to_html(numbers), "Numbers for the whole model, against the step.", "The whole model")
        if not (drawn or numbers):
            html += callouts(["Nothing here is measured by layer or over the steps; the numbers are in the folder."])
    lead = f'<p class="lead">{escape(sentence(str(facts["summary"])))}</p>' if facts.get("summary") else ""
    source = f'<p class="source">Source: {escape(str(facts["source"]))}</p>' if facts.get("source") else ""
    html = lead + html + source if html else ""
    title = str(facts.get("title") or name)
    return Section(name=title, title=f"{title} during training", html=html)


def _about(folder: Path, name: str) -> Json:
    try:
        about = json.loads((folder / "probes" / name / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _notes(name: str, items: Sequence[Shown]) -> list[str]:
    """What the scheduled probe could not measure: each remark once, with its first step."""
    remarks: dict[str, str] = {}
    for item in items:
        for trial in item.trials:
            path = trial.folder / "probes" / name / NOTES
            try:
                lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            except (OSError, ValueError):
                continue
            owner = f"{item.placement}: " if len(items) > 1 else ""
            for line in lines:
                remarks.setdefault(f"{owner}{line.get('note')}", f"{owner}step {line.get('step')}: {line.get('note')}")
    return list(remarks.values())


_LINES_CAPTION = "From the first step (light) to the last (dark), against the depth."
_MAPS_CAPTION = (
    "The same at every probed step: {by} upwards, steps to the right. A map that brightens upwards grows through "
    "depth, one that brightens to the right grows in training."
)
