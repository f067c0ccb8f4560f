"""Build figures for plotly.js from plain dictionaries. The methods have the names of plotly's ``Figure`` methods.

Plotly checks every property. Without these checks, a page takes a third of the time.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from lamina.core.json_types import Json

_TYPES = {"float64": "f8", "float32": "f4", "int32": "i4", "uint32": "u4", "int16": "i2", "int8": "i1", "uint8": "u1"}
_PLAIN = ("range",)  # properties in which plotly.js reads no packed arrays


class Figure:
    """A plotly figure as traces and a layout. The methods change and return the figure."""

    def __init__(self, data: Iterable[Json] = (), layout: Json | None = None, across: int | None = None):
        self.data: list[Json] = list(data)
        self.layout: Json = {"xaxis": {}, "yaxis": {}, **(layout or {})}
        # the number of panels in a row, or None without panels
        self._across = across

    def add_scatter(self, row: int | None = None, col: int | None = None, **trace: object) -> Self:
        return self._add("scatter", row, col, trace)

    def add_bar(self, row: int | None = None, col: int | None = None, **trace: object) -> Self:
        return self._add("bar", row, col, trace)

    def add_heatmap(self, row: int | None = None, col: int | None = None, **trace: object) -> Self:
        return self._add("heatmap", row, col, trace)

    def add_hline(self, y: float, line: Json, text: str = "", font: Json | None = None) -> Self:
        """Add a horizontal line across a figure without panels, with a text below the line's left end."""
        place = {"xref": "x domain", "yref": "y"}
        self._append("shapes", {"type": "line", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line, **place})
        if text:
            corner = {"x": 0, "y": y, "xanchor": "left", "yanchor": "top", "showarrow": False, **place}
            self._append("annotations", {"text": text, "font": font or {}, **corner})
        return self

    def add_vline(self, x: float, line: Json) -> Self:
        """Add a vertical line across a figure without panels."""
        place = {"xref": "x", "yref": "y domain"}
        return self._append("shapes", {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line, **place})

    def update_layout(self, **changes: object) -> Self:
        _merge(self.layout, changes)
        return self

    def update_xaxes(self, row: int | None = None, col: int | None = None, **changes: object) -> Self:
        return self._update("x", row, col, changes)

    def update_yaxes(self, row: int | None = None, col: int | None = None, **changes: object) -> Self:
        return self._update("y", row, col, changes)

    def update_annotations(self, **changes: object) -> Self:
        for annotation in self.layout.get("annotations", ()):
            _merge(annotation, changes)
        return self

    def axes(self, letter: str) -> list[Json]:
        return [axis for name, axis in self.layout.items() if re.fullmatch(f"{letter}axis\\d*", name)]

    def to_json(self) -> str:
        """Return the figure as JSON. Arrays become base64. Outside of arrays, NaN and infinity become null."""
        packed = {"data": [_packed(trace) for trace in self.data], "layout": _packed(self.layout)}
        text = json.dumps(packed, separators=(",", ":"), default=lambda value: value.tolist())
        if "NaN" in text or "Infinity" in text:  # perhaps only in a text
            text = json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))
        return text

    def _add(self, kind: str, row: int | None, col: int | None, trace: Json) -> Self:
        axes = {}
        if self._across is not None and row is not None and col is not None:
            number = _number((row - 1) * self._across + col)
            axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        made: Json = {"type": kind}
        _merge(made, trace | axes)
        for name in ("x", "y"):
            if hasattr(made.get(name), "to_numpy"):  # a column of a table
                made[name] = made[name].to_numpy()
        self.data.append(made)
        return self

    def _append(self, name: str, entry: Json) -> Self:
        self.layout.setdefault(name, []).append(entry)
        return self

    def _update(self, letter: str, row: int | None, col: int | None, changes: Json) -> Self:
        chosen = self.axes(letter)
        if self._across is not None:
            places = [divmod(number, self._across) for number in range(len(chosen))]
            chosen = [
                axis
                for axis, (down, right) in zip(chosen, places, strict=True)
                if row in (None, down + 1) and col in (None, right + 1)
            ]
        for axis in chosen:
            _merge(axis, changes)
        return self


def panels(
    rows: int,
    cols: int,
    *,
    across: float,
    down: float = 0.0,
    titles: Sequence[str] = (),
    share_x: bool = False,
    share_y: str = "",
) -> Figure:
    """Return a figure with a grid of empty panels. As in plotly, the axes are numbered row by row from the top."""
    # ``across`` and ``down`` are the gaps between panels, as fractions of the figure
    width, height = (1 - across * (cols - 1)) / cols, (1 - down * (rows - 1)) / rows
    layout: Json = {}
    annotations = []
    for number in range(rows * cols):
        row, col = divmod(number, cols)
        name, corner = _number(number + 1), (rows - 1) * cols + 1  # the panel below all others on the left
        left, low = col * (width + across), (rows - 1 - row) * (height + down)
        x: Json = {"anchor": f"y{name}", "domain": [left, left + width]}
        y: Json = {"anchor": f"x{name}", "domain": [low, low + height]}
        if share_x and row < rows - 1:
            x |= {"matches": f"x{_number(corner + col)}", "showticklabels": False}
        first = row * cols + 1 if share_y == "row" else corner
        if share_y and number + 1 != first:
            y |= {"matches": f"y{_number(first)}"} | ({"showticklabels": False} if col else {})
        layout |= {f"xaxis{name}": x, f"yaxis{name}": y}
        if number < len(titles) and titles[number]:
            place = {"x": sum(x["domain"]) / 2, "y": low + height, "xref": "paper", "yref": "paper"}
            look = {"showarrow": False, "font": {"size": 16}, "xanchor": "center", "yanchor": "bottom"}
            annotations.append({"text": titles[number], **place, **look})
    return Figure(layout=layout | ({"annotations": annotations} if annotations else {}), across=cols)


def _number(number: int) -> str:
    return "" if number == 1 else str(number)


def _merge(into: Json, changes: Json) -> None:
    """Update a mapping in place with ``changes``. Nested mappings merge, and None removes a key."""
    for name, value in changes.items():
        if name == "title" and isinstance(value, str):
            value = {"text": value}
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and name != "meta":
            kept = into.setdefault(name, {})
            _merge(kept, value)
            if not kept:
                del into[name]
        else:
            into[name] = value


def _packed(value: object) -> object:
    if isinstance(value, dict):
        return {name: entry if name in _PLAIN else _packed(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(entry) for entry in value] if any(isinstance(v, dict | np.ndarray) for v in value) else value
    if not isinstance(value, np.ndarray) or not value.size:
        return value
    if value.dtype == np.int64:
        value = value.astype(np.min_scalar_type(min(int(value.min()), -int(value.max()) - 1)))
    if (kind := _TYPES.get(str(value.dtype))) is None:
        return value
    packed = {"dtype": kind, "bdata": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()}
    return packed | ({"shape": ", ".join(map(str, value.shape))} if value.ndim > 1 else {})
