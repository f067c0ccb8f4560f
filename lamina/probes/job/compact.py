"""Prepare a probe's figure for a page: limit its size, and escape markup."""

from __future__ import annotations

import base64
import re
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go

from lamina.core.json_types import Json
from lamina.probes.engine.figures import evenly

MOST_LINES, MOST_POINTS, MOST_CELLS = 256, 2000, 256  # in a figure, a line, a heat map's side
_HARMLESS = r"/?(?:br|b|i|em|sup|sub|extra)\s*/?>"  # tags without attributes; plotly would follow an <a href=...>
_ARRAYS = ("x", "y", "text", "hovertext", "customdata", "ids")


def compact(figure: go.Figure) -> tuple[go.Figure, str]:
    """Return a smaller figure with escaped texts, and a sentence on the omitted data ("" for a complete figure)."""
    traces: list[Json] = [defuse(trace.to_plotly_json()) for trace in cast("Any", figure.data)]
    reduced: list[str] = []
    lines = [trace for trace in traces if trace.get("type", "scatter") in ("scatter", "scattergl", "bar")]
    if len(lines) > MOST_LINES:
        chosen = {id(lines[i]) for i in evenly(len(lines), MOST_LINES)}
        traces = [trace for trace in traces if id(trace) in chosen or not any(trace is line for line in lines)]
        reduced.append(f"{len(chosen)} of {len(lines)} lines")
    for trace in traces:
        for name in ("x", "y", "z"):
            values = np.asarray(trace[name]) if _is_list(trace.get(name)) else np.empty(0, dtype=object)
            if values.dtype == np.float64:  # a screen shows no more than seven digits
                trace[name] = values.astype(np.float32)
        reduction = _thin_map(trace) if trace.get("type") in ("heatmap", "contour") else _thin_line(trace)
        if reduction and reduction not in reduced:
            reduced.append(reduction)
    small = go.Figure({"data": traces, "layout": defuse(figure.layout.to_plotly_json())}, skip_invalid=True)
    return small, f"The chart shows {', '.join(reduced)}, evenly spaced. The table holds all values." if reduced else ""


def defuse(value: object) -> Any:
    """Escape ``<`` in every string, except in plotly's plain tags. Turn plotly's packed arrays into numpy arrays."""
    if isinstance(value, str):
        return re.sub(rf"<(?!{_HARMLESS})", "&lt;", value)
    if isinstance(value, dict):
        if "bdata" in value and "dtype" in value:
            flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(str(value["dtype"])))
            shape = [int(size) for size in str(value["shape"]).split(",")] if value.get("shape") else [-1]
            return flat.reshape(shape)
        return {k: defuse(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [defuse(v) for v in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        return [defuse(v) for v in value.tolist()]
    return value


def _thin_map(trace: Json) -> str:
    cells = np.asarray(trace.get("z"))
    if cells.ndim != 2 or max(cells.shape) <= MOST_CELLS:
        return ""
    rows, columns = (evenly(size, MOST_CELLS) for size in cells.shape)
    for name, chosen in (("y", rows), ("x", columns)):
        trace[name] = np.asarray(trace[name])[chosen] if trace.get(name) is not None else np.asarray(chosen)
    for name in ("z", "text", "customdata", "hovertext"):
        values = trace.get(name)
        if values is not None and np.asarray(values, dtype=object).shape[:2] == cells.shape:
            trace[name] = np.asarray(values)[np.ix_(rows, columns)]
    return f"{len(rows)} × {len(columns)} of {cells.shape[0]} × {cells.shape[1]} cells"


def _thin_line(trace: Json) -> str:
    length = next((len(trace[name]) for name in ("y", "x") if _is_list(trace.get(name))), 0)
    if length <= MOST_POINTS or trace.get("fill") == "toself":  # a band's outline runs forth and back
        return ""
    chosen = evenly(length, MOST_POINTS)
    arrays = {"marker": ("color", "size"), "error_y": ("array",)}
    for holder, names in ((trace, _ARRAYS), *((trace.get(name) or {}, arrays[name]) for name in arrays)):
        for name in names:
            if _is_list(holder.get(name)) and len(holder[name]) == length:
                holder[name] = np.asarray(holder[name])[chosen]
    return f"{len(chosen)} of {length} points of a line"


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and np.ndim(cast("Any", value)) > 0
