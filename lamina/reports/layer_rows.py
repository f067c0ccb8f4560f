"""A run's rows by layer, as its page draws them: for a long run, at evenly spaced steps of each metric.

Lamina reads the parts one after another, so that memory grows with the chart and not with the record.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lamina.core.frames import Frame
from lamina.probes.engine.figures import evenly
from lamina.training.monitor.writers import LAYER_COLUMNS, layer_parts, read_part

logger = logging.getLogger(__name__)

MOST_STEPS = 240
"""The steps of a metric that are read; no chart shows more than a third of them."""
_TEXTS = ("sublayer", "role", "metric")
_AT_ONCE = 2**22  # bytes of parts that are read once, and not first for their steps
_METRICS = 2**20  # more than there are names
Columns = dict[str, np.ndarray]


class LayerRows:
    """The rows of layers/ that a page may draw: all that are outside the layers, and those of some steps within them.

    Args:
        folder: of the run; parts that can't be read are left out with a warning.
        failed: the step at which the run went wrong: the first record of each metric from there on is read, too.
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
        self._columns: Columns = {name: np.concatenate([part[name] for part in kept or none]) for name in LAYER_COLUMNS}

    @cached_property
    def frame(self) -> Frame:
        """All rows: step, layer (from 0; -1 outside the layers), sublayer, role, index, metric, value."""
        return self._frame(slice(None))

    def of(self, metric: str) -> Frame:
        """Return a metric's rows."""
        return self._frame(self._where(metric))

    def has(self, metric: str) -> bool:
        """Return whether a metric was recorded."""
        return any(name == metric for name, *_ in self._series)

    def outside(self, metric: str) -> Frame:
        """Return the step, the role and the finite value of a metric's rows outside the layers and the embedding."""
        found = [
            (role, at)
            for (name, role, sublayer, _), at in self._series.items()
            if name == metric and (sublayer, role) != ("block", "all")
        ]
        at = np.concatenate([np.zeros(0, int), *(at for _, at in found)])
        roles = np.repeat(np.array([role for role, _ in found], object), [len(at) for _, at in found])
        order = np.argsort(at)
        at, roles = at[order], roles[order]
        kept = (self._columns["layer"][at] < 0) & np.isfinite(self._columns["value"][at])
        at = at[kept]
        return pd.DataFrame(
            {"step": self._columns["step"][at], "role": roles[kept], "value": self._columns["value"][at]}
        )

    def places(self, metric: str) -> list[tuple[str, str, int]]:
        """Return the role, the sub-layer and the index of each of a metric's series within the layers, sorted."""
        inside = self._columns["layer"] >= 0
        return sorted(key[1:] for key, at in self._series.items() if key[0] == metric and inside[at].any())

    def table(
        self, metric: str, role: str, sublayers: Collection[str], index: int | None = None, *, embedding: bool = False
    ) -> Frame:
        """Return a quantity by layer and step, see ``by_depth``; with the rows of layer -1 only for ``embedding``."""
        key = (metric, role, *sublayers, index, embedding)
        if key in self._tables:
            return self._tables[key]
        at = self._where(metric, role, sublayers, index)
        if not embedding:
            at = at[self._columns["layer"][at] >= 0]
        self._tables[key] = by_depth(*(self._columns[name][at] for name in ("layer", "step", "value")))
        return self._tables[key]

    def _frame(self, rows: np.ndarray | slice) -> Frame:
        names = list(self._names)
        return pd.DataFrame(
            {
                name: pd.Categorical.from_codes(values[rows], names) if name in _TEXTS else values[rows]
                for name, values in self._columns.items()
            }
        )

    def _where(
        self,
        metric: str,
        role: str | None = None,
        sublayers: Collection[str] | None = None,
        index: int | None = None,
    ) -> np.ndarray:
        """Return where the rows are, in the order in which they were recorded."""
        found = [
            at
            for (name, of_role, sublayer, number), at in self._series.items()
            if name == metric
            and role in (None, of_role)
            and (sublayers is None or sublayer in sublayers)
            and index in (None, number)
        ]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, int)

    @cached_property
    def _series(self) -> dict[tuple[str, str, str, int], np.ndarray]:
        """Where the rows of each metric, role, sub-layer and index are."""
        names, columns = list(self._names), [self._columns[name] for name in ("metric", "role", "sublayer", "index")]
        keys = np.ravel_multi_index(columns, [1 + int(column.max(initial=0)) for column in columns])
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
        order, ends = np.argsort(of, kind="stable"), np.cumsum(np.bincount(of))[:-1]
        series = {}
        for row, at in zip(first, np.split(order, ends), strict=False):
            metric, role, sublayer, index = (int(column[row]) for column in columns)
            series[names[metric], names[role], names[sublayer], index] = at
        return series

    def _read(self, parts: Sequence[Path], columns: Sequence[str]) -> Iterator[Columns]:
        """Yield the columns of each readable part, texts as their order in ``_names``."""
        for part in parts:
            try:
                yield self._arrays(part, columns)
            except (OSError, ValueError, TypeError, KeyError) as error:
                if len(columns) == len(LAYER_COLUMNS):  # said once
                    logger.warning("%s: left out of the report (%s)", part.name, error)

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
    """Read some columns of a part; of a text, the order of each row's (-1: missing) in a list of all."""
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
    """Return a number for the step and the metric of each row."""
    return part["step"] * _METRICS + part["metric"]


def _shown(keys: np.ndarray, failed: int | None) -> np.ndarray:
    """Return the sorted ``keys`` of each metric's evenly spaced steps, and of its first step from ``failed`` on."""
    shown = []
    for metric in np.unique(keys % _METRICS):
        steps = keys[keys % _METRICS == metric]
        at = set(evenly(len(steps), MOST_STEPS))
        if failed is not None and (first := int(np.searchsorted(steps, failed * _METRICS))) < len(steps):
            at.add(first)
        shown.append(steps[sorted(at)])
    return np.sort(np.concatenate(shown)) if shown else keys


def by_depth(layers: np.ndarray, steps: np.ndarray, values: np.ndarray) -> Frame:
    """Return one quantity as a table: one row per layer (-1: the embedding), one column per step.

    The last value of a layer and step counts. Layers without a value are left out.
    """
    (rows, row), (columns, column) = (np.unique(of, return_inverse=True) for of in (layers, steps))
    table = np.full((len(rows), len(columns)), np.nan)
    known = ~np.isnan(values)
    table[row[known], column[known]] = values[known]
    some = ~np.isnan(table).all(axis=1)
    return pd.DataFrame(table[some], index=pd.Index(rows[some], name="layer"), columns=pd.Index(columns, name="step"))
