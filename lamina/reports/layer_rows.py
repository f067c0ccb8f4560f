"""Read the layer monitor's rows for a page, one file at a time. For a long run, Lamina reads evenly spaced steps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd

from lamina.core.frames import Frame
from lamina.probes.engine.figures import evenly
from lamina.training.monitor.writers import LAYER_COLUMNS, layer_parts, read_part

logger = logging.getLogger(__name__)

MOST_STEPS = 240
"""The maximum number of steps that Lamina reads per metric. Each chart shows at most a third of these steps."""
_TEXTS = ("sublayer", "role", "metric")
_AT_ONCE = 2**22  # up to this total size in bytes, Lamina reads all files at once
_METRICS = 2**20  # more than the number of names
Columns = dict[str, np.ndarray]


class Layout:
    """The layers, metrics and steps of a run's rows, without the values. Runs with the same rows share a layout.

    Args:
        columns: the step, layer, sublayer, role, index and metric of each row, with texts as positions in ``names``
        names: all texts in the rows
    """

    def __init__(self, columns: Columns, names: Sequence[str]):
        self.columns, self.names = columns, names
        self._outside: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._by_depth: dict[tuple[object, ...], tuple[np.ndarray, ByDepth]] = {}

    @cached_property
    def series(self) -> dict[tuple[str, str, str, int], np.ndarray]:
        """Map each metric, role, sub-layer and index to the positions of the matching rows."""
        columns = [self.columns[name] for name in ("metric", "role", "sublayer", "index")]
        keys = np.ravel_multi_index(columns, [1 + int(column.max(initial=0)) for column in columns])
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
        order, ends = np.argsort(of, kind="stable"), np.cumsum(np.bincount(of))[:-1]
        series = {}
        for row, at in zip(first, np.split(order, ends), strict=False):
            metric, role, sublayer, index = (int(column[row]) for column in columns)
            series[self.names[metric], self.names[role], self.names[sublayer], index] = at
        return series

    @cached_property
    def metrics(self) -> frozenset[str]:
        return frozenset(metric for metric, *_ in self.series)

    @cached_property
    def places(self) -> list[tuple[str, tuple[str, str, int]]]:
        """Return the series that have rows inside the layers, sorted, as (metric, (role, sub-layer, index))."""
        inside = self.columns["layer"] >= 0
        found = (
            (metric, (role, sub, index)) for (metric, role, sub, index), at in self.series.items() if inside[at].any()
        )
        return sorted(found)

    def where(
        self,
        metric: str,
        role: str | None = None,
        sublayers: Collection[str] | None = None,
        index: int | None = None,
    ) -> np.ndarray:
        """Return the positions of the rows that match the arguments, in recorded order. None matches everything."""
        found = [
            at
            for (name, of_role, sublayer, number), at in self.series.items()
            if name == metric
            and role in (None, of_role)
            and (sublayers is None or sublayer in sublayers)
            and index in (None, number)
        ]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, int)

    def outside(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and roles of a metric's rows outside the layers and the embedding."""
        if metric in self._outside:
            return self._outside[metric]
        found = [
            (role, at)
            for (name, role, sublayer, _), at in self.series.items()
            if name == metric and (sublayer, role) != ("block", "all")
        ]
        at = np.concatenate([np.zeros(0, int), *(at for _, at in found)])
        roles = np.repeat(np.array([role for role, _ in found], object), [len(at) for _, at in found])
        order = np.argsort(at)
        at, roles = at[order], roles[order]
        kept = self.columns["layer"][at] < 0
        self._outside[metric] = at[kept], roles[kept]
        return self._outside[metric]

    def by_depth(
        self, metric: str, role: str, sublayers: tuple[str, ...], index: int | None, embedding: bool
    ) -> tuple[np.ndarray, ByDepth]:
        """Return the positions of the matching rows, and the shape of the table that ``LayerRows.table`` returns."""
        key = (metric, role, sublayers, index, embedding)
        if key not in self._by_depth:
            at = self.where(metric, role, sublayers, index)
            if not embedding:
                at = at[self.columns["layer"][at] >= 0]
            self._by_depth[key] = at, ByDepth(self.columns["layer"][at], self.columns["step"][at])
        return self._by_depth[key]


class ByDepth:
    """The shape of a table with one row per layer (-1: the embedding) and one column per step."""

    def __init__(self, layers: np.ndarray, steps: np.ndarray):
        (rows, self._row), (columns, self._column) = (np.unique(of, return_inverse=True) for of in (layers, steps))
        self._layers, self._steps = pd.Index(rows, name="layer"), pd.Index(columns, name="step")

    def table(self, values: np.ndarray) -> Frame:
        """Return ``values`` as a table without empty layers. If a cell has several values, the last value counts."""
        table = np.full((len(self._layers), len(self._steps)), np.nan)
        known = ~np.isnan(values)
        table[self._row[known], self._column[known]] = values[known]
        some = np.flatnonzero(~np.isnan(table).all(axis=1))
        if len(some) < len(table):
            return pd.DataFrame(table[some], index=self._layers[some], columns=self._steps)
        return pd.DataFrame(table, index=self._layers, columns=self._steps)


_layouts: WeakValueDictionary[bytes, Layout] = WeakValueDictionary()


def _layout(columns: Columns, names: Sequence[str]) -> Layout:
    """Return the layout of rows. Runs with the same layers, metrics and steps share a layout, to save memory."""
    key = hashlib.sha256("\0".join(names).encode(errors="replace"))
    for column in columns.values():
        key.update(np.ascontiguousarray(column).tobytes())
    layout = _layouts.get(key.digest())
    if layout is None:
        layout = _layouts[key.digest()] = Layout(columns, names)
    return layout


class LayerRows:
    """The rows of layers/ for a page: all rows outside the layers, and the layers' rows at some steps.

    Args:
        folder: the run's folder. Lamina skips unreadable files with a warning.
        failed: the step at which the run went wrong. Lamina always reads the first record of each metric at or
            after this step.
    """

    def __init__(self, folder: Path, failed: int | None = None):
        self._names: dict[str, int] = {}  # every text of the rows, by its order
        self._tables: dict[tuple[object, ...], Frame] = {}
        parts = layer_parts(folder)
        small = sum(part.stat().st_size for part in parts) < _AT_ONCE
        whole = list(self._read(parts, LAYER_COLUMNS)) if small else []
        inside = whole if small else self._read(parts, ("step", "layer", "metric"))
        seen = [np.unique(_keys(part)[part["layer"] >= 0]) for part in inside]
        shown = _shown(np.unique(np.concatenate(seen)) if seen else np.zeros(0, int), failed)
        kept = []
        for part in whole if small else self._read(parts, LAYER_COLUMNS):
            rows = (part["layer"] < 0) | np.isin(_keys(part), shown)
            kept.append({name: values[rows] for name, values in part.items()})
        none = [{name: np.zeros(0, int) for name in LAYER_COLUMNS}]
        columns = {name: np.concatenate([part[name] for part in kept or none]) for name in LAYER_COLUMNS}
        self._values = columns.pop("value")
        self._layout = _layout(columns, list(self._names))

    @cached_property
    def frame(self) -> Frame:
        """Return all rows: step, layer (from 0; -1 outside the layers), sublayer, role, index, metric, value."""
        return self._frame(slice(None))

    def of(self, metric: str) -> Frame:
        return self._frame(self._layout.where(metric))

    def has(self, metric: str) -> bool:
        return metric in self._layout.metrics

    def outside(self, metric: str) -> Columns:
        """Return the step, role and finite value of a metric's rows outside the layers and the embedding."""
        at, roles = self._layout.outside(metric)
        values = self._values[at]
        kept = np.isfinite(values)
        return {"step": self._layout.columns["step"][at][kept], "role": roles[kept], "value": values[kept]}

    def places(self, metric: str) -> list[tuple[str, str, int]]:
        return [place for name, place in self._layout.places if name == metric]

    def table(
        self, metric: str, role: str, sublayers: Collection[str], index: int | None = None, *, embedding: bool = False
    ) -> Frame:
        """Return a quantity as a table with one row per layer and one column per step. ``embedding`` adds layer -1."""
        key = (metric, role, tuple(sublayers), index, embedding)
        if key not in self._tables:
            at, by_depth = self._layout.by_depth(*key)
            self._tables[key] = by_depth.table(self._values[at])
        return self._tables[key]

    def _frame(self, rows: np.ndarray | slice) -> Frame:
        columns = {**self._layout.columns, "value": self._values}
        return pd.DataFrame(
            {
                name: pd.Categorical.from_codes(columns[name][rows], self._layout.names)
                if name in _TEXTS
                else columns[name][rows]
                for name in LAYER_COLUMNS
            }
        )

    def _read(self, parts: Sequence[Path], columns: Sequence[str]) -> Iterator[Columns]:
        for part in parts:
            try:
                yield self._arrays(part, columns)
            except (OSError, ValueError, TypeError, KeyError) as error:
                if len(columns) == len(LAYER_COLUMNS):  # said once
                    logger.warning("%s is not readable, so the report leaves it out (%s)", part.name, error)

    def _arrays(self, part: Path, columns: Sequence[str]) -> Columns:
        arrays: Columns = {}
        table = _table(part, columns)
        whole = np.ones(len(table["step"]), bool)
        for name, values in table.items():
            if isinstance(values, np.ndarray):
                arrays[name] = values
                continue
            order, texts = values
            whole &= order >= 0
            codes = [self._names.setdefault(str(text), len(self._names)) for text in texts]
            arrays[name] = np.array([*codes, -1])[order]
        return arrays if whole.all() else {name: values[whole] for name, values in arrays.items()}


def _table(part: Path, columns: Sequence[str]) -> dict[str, np.ndarray | tuple[np.ndarray, list[str]]]:
    """Read columns of a file. For texts, return each row's position in a list of texts (-1: no text), and the list."""
    if part.suffix == ".npz":
        read = read_part(part)
        coded = {name: np.unique(read[name], return_inverse=True) for name in _TEXTS}
        return {
            name: (coded[name][1], coded[name][0].tolist()) if name in _TEXTS else np.array(read[name], _kind(name))
            for name in columns
        }
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(part.absolute(), read_dictionary=list(_TEXTS)) as file:
        table = file.read(list(columns))
    found: dict[str, np.ndarray | tuple[np.ndarray, list[str]]] = {}
    for name in columns:
        values = table.column(name)
        if name in _TEXTS:
            coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
            joined = coded.unify_dictionaries().combine_chunks()
            found[name] = joined.indices.fill_null(-1).to_numpy(zero_copy_only=False), joined.dictionary.to_pylist()
        elif values.null_count and name != "value":
            raise ValueError(f"{name}: missing in a row")
        else:
            found[name] = values.to_numpy().astype(_kind(name))
    return found


def _kind(name: str) -> type:
    return float if name == "value" else int


def _keys(part: Columns) -> np.ndarray:
    return part["step"] * _METRICS + part["metric"]


def _shown(keys: np.ndarray, failed: int | None) -> np.ndarray:
    """Return the sorted keys of the rows to read: evenly spaced steps, and each metric's first step after a failure."""
    shown = []
    for metric in np.unique(keys % _METRICS):
        steps = keys[keys % _METRICS == metric]
        at = set(evenly(len(steps), MOST_STEPS))
        if failed is not None and (first := int(np.searchsorted(steps, failed * _METRICS))) < len(steps):
            at.add(first)
        shown.append(steps[sorted(at)])
    return np.sort(np.concatenate(shown)) if shown else keys
