"""Draw the results of probes that ran during training, with one section per probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from lamina.jobs.names import ABOUT, NOTES
from lamina.jobs.run_folder import parse_lines
from lamina.reports import charts, depth
from lamina.reports.charts import line_of
from lamina.reports.depth import Quantity
from lamina.reports.page import Section, callouts, figure, sentence
from lamina.reports.plotting import Figure
from lamina.reports.records import Frame, Trial, groups, lenient_mapping, select
from lamina.reports.style import Shown

_BY_DEPTH = ("layer", "size", "distance")  # possible x axes. Lamina uses the first that a frame has
_TEXTS = ("metric", "sublayer", "role", "format", "meaning")  # columns that tell measurements apart
_WHOLE = ("model", "block", "state", "all", "jacobian", "", None)  # values for a whole layer
_QUANTITIES = 6  # per probe


def sections(items: Sequence[Shown]) -> list[Section]:
    names = sorted({name for item in items for trial in item.trials for name in trial.probes})
    return [section for name in names if (section := _section(name, items)).html]


def quantities(name: str, frame: Frame, metrics: Sequence[str] = ()) -> list[Quantity]:
    """Return a probe's quantities by layer, either all or only ``metrics``. Quantities of whole layers come first."""
    by = next((column for column in _BY_DEPTH if column in frame), None)
    if by is None or frame.empty:
        return []
    several_norms = ("index",) if "path" in frame else ()  # each row names its module
    keys = [k for k in (*_TEXTS, *several_norms) if k in frame and frame[k].notna().any()]
    ranked = []
    for fixed, rows in groups(frame[frame[by] >= 0] if keys else frame, keys):
        along = "start" if by == "size" and rows[by].nunique() < 2 and "start" in rows else by
        metric = fixed.get("metric")
        if rows[along].nunique() < 2 or (metrics and metric not in metrics):
            continue
        if "index" in rows and rows["index"].nunique() > 1:  # the largest of top-k
            fixed["index"] = rows["index"].min()
            rows = rows[rows["index"] == fixed["index"]]
        values: Frame = pd.to_numeric(rows["value"], errors="coerce")
        values = values[np.isfinite(values)]
        log = bool(len(values)) and values.min() > 0 and values.max() > 8 * values.min()
        whole = fixed.get("sublayer") in _WHOLE and fixed.get("role") in _WHOLE
        quantity = Quantity(label=_label(name, fixed), table=partial(table, name, along, fixed), by=along, log=log)
        ranked.append(((not whole, metrics.index(metric) if metrics else 0), quantity))
    return [quantity for _, quantity in sorted(ranked, key=lambda pair: pair[0])]


def table(probe: str, by: str, fixed: Mapping[str, Any], trial: Trial) -> Frame:
    """Return a probe's mean values as a table, with one row per layer (or distance) and one column per step."""
    rows = select(trial.probes.get(probe, pd.DataFrame()), fixed)
    if rows.empty or by not in rows:
        return pd.DataFrame()
    rows = rows[rows[by] >= 0]
    return rows.pivot_table(index=by, columns="step", values="value", aggfunc="mean").astype(float)


def _label(probe: str, fixed: Mapping[str, Any]) -> str:
    values = {k: str(v).replace("_", " ") for k, v in fixed.items()}
    silent = ("all", "model", "block", "", "None", "nan")
    rest = [v for k, v in values.items() if k not in ("metric", "index") and v not in silent]
    if rest and (number := float(values.get("index", 0))) > 0:
        rest[-1] += f" {number + 1:g}"  # the second of several norms
    name = values.get("metric", probe.replace("_", " "))
    return name + (f" ({', '.join(rest)})" if rest else "")


def over_steps(items: Sequence[Shown], frames: dict[str, Frame], name: str) -> Figure | None:
    """Draw a probe's numbers for the whole model against the step, with one panel per metric."""
    numbers: dict[str, list[tuple[Shown, Frame]]] = {}
    for item in items:
        rows = frames.get(item.placement, pd.DataFrame())
        if rows.empty or any(column in rows for column in _BY_DEPTH[1:]):
            continue
        rows = rows[rows["layer"] < 0] if "layer" in rows else rows
        keys = [k for k in ("metric", "sublayer", "role", "index") if k in rows and rows[k].nunique() > 0]
        for fixed, group in groups(rows, keys, dropna=True):
            if group["step"].nunique() > 1:
                fixed.pop("index", None)
                means = group.groupby("step", as_index=False)["value"].mean()
                numbers.setdefault(_label(name, fixed), []).append((item, means))
    panels, named = {}, set()
    for label in sorted(numbers, key=lambda label: "(" in label)[:_QUANTITIES]:  # the whole model's before its parts
        panels[label] = []
        for item, rows in numbers[label]:
            legend = len(items) > 1 and item.placement not in named
            values = rows["value"].to_numpy(dtype=np.float32)
            hover = "step %{x}: %{y:.4g}"
            panels[label].append(line_of(item, rows["step"], values, legend=legend, markers=True, hover=hover))
            named.add(item.placement)
    figure = charts.over_steps(panels, 320)
    return None if figure is None else figure.update_yaxes(exponentformat="power")


def _section(name: str, items: Sequence[Shown]) -> Section:
    abouts = (lenient_mapping(trial.folder / "probes" / name / ABOUT) for item in items for trial in item.trials)
    facts = next((about for about in abouts if about), {})
    frames = {
        item.placement: pd.concat(tables)
        for item in items
        if (tables := [f for trial in item.trials if len(f := trial.probes.get(name, pd.DataFrame()))])
    }
    html = callouts(_notes(name, items))
    if frames:
        everything: Frame = pd.concat(frames.values(), ignore_index=True)
        every = quantities(name, everything, tuple(facts.get("over_steps") or ()))
        for at, quantity in enumerate(every[:_QUANTITIES]):
            caption = "" if at else _LINES_CAPTION
            html += figure(depth.by_steps(items, quantity), caption, quantity.label.capitalize())
            if everything["step"].nunique() > 2:
                html += figure(depth.heat_maps(items, quantity), "" if at else _MAPS_CAPTION.format(by=quantity.by))
        if len(every) > _QUANTITIES:
            left = ", ".join(quantity.label for quantity in every[_QUANTITIES:])
            html += callouts([f"The page draws {_QUANTITIES} of {len(every)} quantities. The folder also has {left}."])
        numbers = over_steps(items, frames, name)
        html += figure(numbers, "Numbers for the whole model, against the step.", "The whole model")
        if not (every or numbers):
            html += callouts(["This probe has no chart by layer or by step. The numbers are in the folder."])
    lead = f'<p class="lead">{escape(sentence(str(facts["summary"])))}</p>' if facts.get("summary") else ""
    source = f'<p class="source">Source: {escape(str(facts["source"]))}</p>' if facts.get("source") else ""
    title = str(facts.get("title") or name)
    return Section(title, f"{title} during training", lead + html + source if html else "")


def _notes(name: str, items: Sequence[Shown]) -> list[str]:
    """Return the distinct notes about failed measurements of a probe, each with the step of the first failure."""
    remarks: dict[str, str] = {}
    for item in items:
        owner = f"{item.placement}: " if len(items) > 1 else ""
        for trial in item.trials:
            for line in parse_lines(trial.folder / "probes" / name / NOTES)[0]:
                remarks.setdefault(f"{owner}{line.get('note')}", f"{owner}step {line['step']}: {line.get('note')}")
    return list(remarks.values())


_LINES_CAPTION = "Each line shows one step against the depth. The first step is light, and the last step is dark."
_MAPS_CAPTION = (
    "The map shows this quantity at every probed step. The {by} goes upward, and the steps go to the right. If a map "
    "becomes brighter upward, the quantity grows with depth. If a map becomes brighter to the right, the quantity "
    "grows during training."
)
