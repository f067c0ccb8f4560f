"""Series with their steps, from the lines of a history: Lamina finds the column of steps and the start of another
run.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from lamina.errors import UserError
from lamina.reports.histories.names import RUNS, STEPS, TIMES, parameter_of, plain, whole

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Bins: TypeAlias = Any
"""part of a histogram, as W&B writes it"""
Series: TypeAlias = tuple[Ints, Floats]
"""steps, or numbers of lines, in order, and values"""

_MOST = 2**53  # the largest step: beyond it a float is no whole number
_COVERED = 0.9  # of the lines that a column of steps must have, beside the best one
_SHUFFLED = 0.25  # of the lines: where steps go back more often, the lines are in no order
_SHOWN = 5


@dataclass(kw_only=True)
class Recording:
    """What one run's history holds.

    Attributes:
        form: what was read, in words.
        series: by name.
        rows: the number of lines, or of steps.
        clock: the name of the steps' column; empty where steps are numbers of lines.
        notes: for the user, a line each.
    """

    form: str
    series: dict[str, Series]
    rows: int
    clock: str = "step"
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Columns:
    """The columns of a table or of lines, each as the numbers of its lines and its values.

    Attributes:
        rows: how many lines there are.
        runs: texts in columns that tell runs apart, by name and line.
    """

    form: str
    rows: int = 0
    values: dict[str, Series] = field(default_factory=dict)
    runs: dict[str, dict[int, str]] = field(default_factory=dict)


def number_of(value: object) -> float | None:
    """Return a value as a number; for a histogram, the norm of the values in its bins; None for anything else."""
    if isinstance(value, float):
        return value
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str) and "," in value and re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", value.strip()):
        value = value.replace(",", "")
    try:
        return _norm_of_bins(value) if isinstance(value, Mapping) else float(str(value))
    except (ValueError, TypeError, LookupError, OverflowError):  # bins that are none
        return None


def _norm_of_bins(histogram: Mapping[str, Bins]) -> float | None:
    """Return the norm of values in bins, as if they were uniform in each: E[x^2] = middle^2 + width^2 / 12."""
    counts, edges, packed = histogram.get("values"), histogram.get("bins"), histogram.get("packedBins")
    if not isinstance(counts, list):
        return None
    if isinstance(packed, Mapping):
        low, size, count = (float(packed[name]) for name in ("min", "size", "count"))
        edges = [low + size * index for index in range(len(counts) + 1)] if count == len(counts) else None
    if not isinstance(edges, list) or len(edges) != len(counts) + 1:
        return None
    bins = zip(counts, edges, edges[1:], strict=False)
    return math.sqrt(sum(n * (((low + high) / 2) ** 2 + (high - low) ** 2 / 12) for n, low, high in bins))


def of_lines(lines: Iterable[Mapping[str, object]], form: str) -> Columns:
    """Collect the columns of lines: what is no number is left out, and what tells runs apart is kept."""
    columns = Columns(form=form)
    places: dict[str, tuple[array[int], array[float]]] = {}
    for line in lines:
        for column, value in line.items():
            name = str(column)
            if plain(name) in RUNS and value not in (None, ""):
                columns.runs.setdefault(name, {})[columns.rows] = str(value)
            elif (number := number_of(_step_of(value) if plain(name) in STEPS else value)) is not None:
                at, of = places.setdefault(name, (array("q"), array("d")))
                at.append(columns.rows)
                of.append(number)
        columns.rows += 1
    columns.values = {name: (np.array(at, np.int64), np.array(of, np.float64)) for name, (at, of) in places.items()}
    return columns


def _step_of(value: object) -> object:
    """Return the step in a cell: that of "601/2161" is 601."""
    return value.partition("/")[0].strip() if isinstance(value, str) else value


def of_points(points: Iterable[tuple[str, int, float]], form: str) -> Recording:
    """Collect points of (name, step, value); of a step that comes twice, the last one holds."""
    by_name: dict[str, dict[int, float]] = {}
    for name, step, value in points:
        by_name.setdefault(name, {})[step] = value
    series = {}
    for name, values in by_name.items():
        steps = np.array(sorted(values), np.int64)
        series[name] = (steps, np.array([values[step] for step in steps.tolist()]))
    return Recording(form=form, series=series, rows=len({step for values in by_name.values() for step in values}))


def runs_of(columns: Columns) -> dict[str, Recording]:
    """Return the runs in a table, by name: one for each run id, prefix of W&B's columns, or start of the steps.

    Raises UserError for steps that are too large.
    """
    recordings: dict[str, Recording] = {}
    for name, part in _by_id(columns).items():
        for number, run in enumerate(runs := _by_start(part), start=1):
            recordings[" ".join(filter(None, (name, f"{number}" if len(runs) > 1 or not name else "")))] = run
    return recordings


def _by_id(columns: Columns) -> dict[str, Columns]:
    """Split a table by its ids of runs, and by the names before W&B's columns ("brave-sun-1 - train/loss")."""
    for marks in columns.runs.values():
        if len(names := dict.fromkeys(marks.values())) > 1:
            of = np.array([marks.get(line, "") for line in range(columns.rows)])
            return {name: _of_lines(columns, of == name) for name in names}
    prefixes = dict.fromkeys(name.rpartition(" - ")[0] for name in columns.values if " - " in name)
    shared = {name: series for name, series in columns.values.items() if " - " not in name}
    parts: dict[str, Columns] = {}
    for prefix in prefixes or [""]:
        own = {
            name.rpartition(" - ")[2]: series
            for name, series in columns.values.items()
            if name.startswith(f"{prefix} - ")
        }
        values = {name: series for name, series in {**shared, **own}.items() if not name.endswith(("__MIN", "__MAX"))}
        if len(prefixes) < 2 or any(whole(name) or parameter_of(name) for name in own):
            parts[prefix if len(prefixes) > 1 else ""] = Columns(form=columns.form, rows=columns.rows, values=values)
    return parts


def _of_lines(columns: Columns, chosen: Bools) -> Columns:
    """Return the lines of a table for which ``chosen`` is true, counted anew."""
    count = np.cumsum(chosen) - 1
    values = {name: (count[at[chosen[at]]], of[chosen[at]]) for name, (at, of) in columns.values.items()}
    kept = {name: series for name, series in values.items() if len(series[0])}
    return Columns(form=columns.form, rows=int(chosen.sum()), values=kept)


def _by_start(columns: Columns) -> list[Recording]:
    """Split a table where its steps start anew."""
    judged = np.zeros(columns.rows, bool)
    for name, (at, _) in columns.values.items():
        if whole(name) or parameter_of(name):
            judged[at] = True
    lines = np.flatnonzero(judged) if judged.any() else np.arange(columns.rows)
    clock, steps = _clock(columns, lines)
    if not len(lines):
        return [Recording(form=columns.form, series={}, rows=columns.rows, clock=clock)]
    epochs = next((series for name, series in columns.values.items() if plain(name) in ("epoch", "train_epoch")), None)
    of_epoch = _carried(epochs, columns.rows)[lines] if epochs is not None else None
    timeline = steps[lines] if clock else of_epoch
    cuts = _starts(timeline) if timeline is not None and (clock or len(np.unique(timeline)) > 2) else []
    notes: list[str] = []
    if clock and cuts and of_epoch is not None and all(of_epoch[cut] > of_epoch[cut - 1] for cut in cuts):
        written = steps.copy()
        for cut in cuts:  # the steps of an epoch are counted from its start, 0 or later
            begun = lines[cut]
            steps[begun:] += steps[begun - 1] + max(written[begun], 1) - steps[begun]
        cuts = []
        notes.append(f"{clock} restarts in each epoch, so Lamina keeps counting")
    bounds = [0, *(int(lines[cut]) for cut in cuts), columns.rows]
    return [_one(columns, steps, clock, notes, *ends) for ends in pairwise(bounds)]


def _one(columns: Columns, steps: Ints, clock: str, notes: Sequence[str], first: int, last: int) -> Recording:
    series, gone = {}, 0
    orders: dict[int, tuple[slice, Bools, Ints, Ints, int]] = {}  # of lines that columns share
    for name, (at, of) in columns.values.items():
        if plain(name) in STEPS or plain(name) in TIMES or name == clock:
            continue
        if id(at) not in orders:
            inside = slice(*np.searchsorted(at, (first, last)))
            steps_inside = steps[at[inside]]
            kept = _latest(steps_inside)
            order = np.argsort(steps_inside[kept], kind="stable")
            left = int((~kept).sum()) if (np.diff(steps_inside) < 0).any() else 0
            orders[id(at)] = inside, kept, order, steps_inside[kept][order], left
        inside, kept, order, ordered, left = orders[id(at)]
        if left > gone and (whole(name) or parameter_of(name)):
            gone = left
        if len(ordered):
            series[name] = (ordered, of[inside][kept][order])
    again = f"the steps go back, so Lamina skips {gone} records whose steps come again later"
    return Recording(
        form=columns.form, series=series, rows=last - first, clock=clock, notes=[*notes, *([again] if gone else [])]
    )


def _latest(steps: Ints) -> Bools:
    """Return which values hold: those with no later value of an earlier or the same step, unless steps are shuffled."""
    if len(steps) < 2:
        return np.ones(len(steps), bool)
    back = np.diff(steps) < 0
    if back.mean() > _SHUFFLED:
        unique = np.zeros(len(steps), bool)
        unique[[len(steps) - 1 - at for at in np.unique(steps[::-1], return_index=True)[1]]] = True
        return unique
    later = np.minimum.accumulate(steps[::-1])[::-1]
    return np.append(steps[:-1] < later[1:], True)


def _clock(columns: Columns, lines: Ints) -> tuple[str, Ints]:
    """Return the name of the column that has the steps, and each line's step; "" and line numbers without one."""
    named = [(STEPS.index(plain(name)), name) for name in columns.values if plain(name) in STEPS]
    candidates = []
    for _, name in sorted(named):
        at, of = columns.values[name]
        if np.isfinite(of).all() and (np.abs(of) > _MOST).any():
            raise UserError(f"step {np.abs(of).max():.0e} in the column {name!r} is too large (allowed: up to 2^53)")
        if np.isfinite(of).all() and (of == np.round(of)).all() and len(np.unique(of)) > min(1, len(lines) - 1):
            covered = float(np.isin(lines, at).mean()) if len(lines) else 0.0
            candidates.append((covered, name, _carried((at, of), columns.rows).astype(np.int64)))
    usable = [candidate for candidate in candidates if candidate[0] >= _COVERED * max(each[0] for each in candidates)]
    ordered = [candidate for candidate in usable if not _starts(candidate[2][lines])] or [
        candidate for candidate in usable if plain(candidate[1]) != "progress_bar"
    ]
    if ordered:
        return ordered[0][1], ordered[0][2]
    count = np.zeros(columns.rows, np.int64)
    count[lines] = 1
    return "", np.cumsum(count)


def _carried(series: Series, rows: int) -> Floats:
    """Return a value for each line: its own, or the last one before it."""
    at, of = series
    last = np.searchsorted(at, np.arange(rows), side="right") - 1
    return of[np.maximum(last, 0)]


def _starts(steps: Ints | Floats) -> list[int]:
    """Return where steps start anew: they go back to the first ones of the run so far."""
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if len(back) > _SHUFFLED * len(steps):
        runs = np.diff(np.array([0, *back.tolist(), len(steps)]))
        if len(back) > _SHOWN or runs.min() < _SHOWN:  # in no order
            return []
    starts, first = [], 0
    for at in back.tolist():
        begun = steps[first:at]
        apart = float(np.median(np.abs(np.diff(begun)))) if len(begun) > 1 else 1.0
        if steps[at] <= begun[0] + apart:
            starts.append(at)
            first = at
    return starts
