"""Turn the lines of another tool's log into series by step: find the column with the steps, and separate the runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from lamina.errors import UserError
from lamina.reports.histories.names import (
    EPOCH_STEPS,
    EPOCHS,
    RUNS,
    STEPS,
    TIMES,
    parameter_of,
    plain,
    step_rank,
    whole,
)
from lamina.reports.histories.numbers import has_comma, number_of, with_commas

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Series: TypeAlias = tuple[Ints, Floats]
"""Steps (or line numbers) in ascending order, and the values at these steps."""

_MOST = 2**53  # the largest step: beyond it a float is no whole number
_COVERED = 0.9  # of the lines that a column of steps must have, beside the best one
_DIFFERENT = 0.01  # of its values, which many processes may repeat: an epoch that is called a batch repeats far more
_COMMON, _RARE = 0.25, 0.1  # of the lines, below which a step is rare, and of the same of a rare one
_OWN = 0.5  # of the same of a progress bar, which stands still while records are printed beside it
_SHUFFLED = 0.25  # of the lines: where steps go back more often, the lines are in no order
_SHOWN = 5
_NOTHING: Series = (np.array([], np.int64), np.array([]))


@dataclass(kw_only=True)
class Recording:
    form: str  # the kind of file, in words
    series: dict[str, Series]  # the series, by name
    rows: int  # the number of lines or steps
    clock: str = "step"  # the name of the column with the steps ("" if Lamina counts lines)
    notes: list[str] = field(default_factory=list)  # lines for the user
    odd: Mapping[str, str] = field(default_factory=dict)  # the first text in each column that holds no numbers


@dataclass(kw_only=True)
class Columns:
    """The columns of a table or of a log. Each column holds values and their line numbers."""

    form: str
    rows: int = 0  # the number of lines
    values: dict[str, Series] = field(default_factory=dict)
    # the texts in columns that separate runs, such as run_name, by column and line
    runs: dict[str, dict[int, str]] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)  # the first text in each column that holds no numbers


class _Column:
    def __init__(self, name: str):
        self.is_run, self.is_step = plain(name) in RUNS, step_rank(name) is not None
        self.plain = not (self.is_run or self.is_step)
        self.at, self.of = array("q"), array("d")
        self.runs: dict[int, str] = {}
        self.commas: list[tuple[int, str]] = []
        self.first: object = None
        self.odd = ""

    def add(self, row: int, value: object) -> None:
        """Add a cell that Python cannot read as a number."""
        self.first = value if self.first is None else self.first
        if self.is_run:
            if value not in (None, ""):
                self.runs[row] = str(value)
            return
        if self.is_step and isinstance(value, str):
            value = value.partition("/")[0].strip()
        if isinstance(value, str) and "," in value and has_comma(value):
            self.commas.append((row, value))
        elif (number := number_of(value)) is not None:
            self.at.append(row)
            self.of.append(number)
        elif not self.odd and value is not None and str(value).strip():
            self.odd = str(value).strip()[:40]


def of_lines(lines: Iterable[Mapping[str, object]], form: str) -> Columns:
    """Collect the lines' values by column. Keep only numbers, and texts that separate runs."""
    columns, known, row = Columns(form=form), dict[str, _Column](), -1
    for row, line in enumerate(lines):
        for name, value in line.items():
            if (column := known.get(name)) is None:
                column = known[name] = _Column(str(name))
            direct = (column.plain and not isinstance(value, bool)) or (type(value) is int and not column.is_run)
            if direct and isinstance(value, (float, str, int)):
                try:
                    number = float(value)
                except (ValueError, OverflowError):
                    column.add(row, value)
                    continue
                if column.first is None:
                    column.first = value
                column.at.append(row)
                column.of.append(number)
            elif type(value) is dict and number_of(value) is None:
                for inner, part in _judged_inside(str(name), value):
                    known.setdefault(inner, _Column(inner)).add(row, part)
            else:
                column.add(row, value)
    columns.rows = row + 1
    pointed = any("." in str(column.first) for column in known.values())
    columns.runs = {name: column.runs for name, column in known.items() if column.runs}
    columns.values = {
        name: (np.array(column.at, np.int64), np.array(column.of, np.float64))
        for name, column in known.items()
        if len(column.at)
    }
    add_commas(columns, {name: column.commas for name, column in known.items() if column.commas}, points=pointed)
    columns.odd = {str(name): column.odd for name, column in known.items() if column.odd and name not in columns.values}
    return columns


def _judged_inside(name: str, inner: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    """Yield the metrics and steps in a cell with a mapping, such as {"train": {"loss": 2.3}}."""
    for key, value in inner.items():
        path = f"{name}/{key}"
        if isinstance(value, Mapping):
            yield from _judged_inside(path, value)
        elif whole(path) or step_rank(path) is not None:
            yield path, value


def add_commas(columns: Columns, commas: Mapping[str, Sequence[tuple[int, str]]], *, points: bool) -> None:
    """Add numbers with a comma to the columns. Raises UserError for a loss or norm with ambiguous commas."""
    if not commas:
        return
    steps = [name for name in commas if step_rank(name) is not None]
    read = with_commas({name: [text for _, text in own] for name, own in commas.items()}, whole=steps, points=points)
    for name, numbers in read.items():
        if numbers is None:
            if whole(name) or parameter_of(name):
                text = commas[name][0][1].strip()
                raise UserError(
                    f"{name}: {text!r} may mean {text.replace(',', '')} or {text.replace(',', '.')}, and no other "
                    "number shows which. Write decimal points, and leave out thousands separators."
                )
            continue
        at, of = columns.values.get(name, _NOTHING)
        at = np.concatenate([at, np.array([row for row, _ in commas[name]], np.int64)])
        order = np.argsort(at, kind="stable")
        columns.values[name] = at[order], np.concatenate([of, np.array(numbers)])[order]


def of_points(points: Iterable[tuple[str, int, float]], form: str) -> Recording:
    """Collect points of (name, step, value). If a series has a step twice, the last value counts."""
    by_name: dict[str, dict[int, float]] = {}
    for name, step, value in points:
        by_name.setdefault(name, {})[step] = value
    series = {}
    for name, values in by_name.items():
        steps = np.array(sorted(values), np.int64)
        series[name] = (steps, np.array([values[step] for step in steps.tolist()]))
    return Recording(form=form, series=series, rows=len({step for values in by_name.values() for step in values}))


def runs_of(columns: Columns) -> dict[str, Recording]:
    """Split a table into runs: by the run id, by W&B's prefix of the columns, or where the steps start again."""
    recordings: dict[str, Recording] = {}
    for name, part in _by_id(columns).items():
        for number, run in enumerate(runs := _by_start(part), start=1):
            recordings[" ".join(filter(None, (name, f"{number}" if len(runs) > 1 or not name else "")))] = run
    return recordings


def _by_id(columns: Columns) -> dict[str, Columns]:
    """Split a table by run. W&B puts the run's name before a column's name ("brave-sun-1 - train/loss")."""
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
            parts[prefix if len(prefixes) > 1 else ""] = replace(columns, values=values, runs={})
    return parts


def _of_lines(columns: Columns, chosen: Bools) -> Columns:
    count = np.cumsum(chosen) - 1
    values = {name: (count[at[chosen[at]]], of[chosen[at]]) for name, (at, of) in columns.values.items()}
    kept = {name: series for name, series in values.items() if len(series[0])}
    return replace(columns, rows=int(chosen.sum()), values=kept, runs={})


def _by_start(columns: Columns) -> list[Recording]:
    """Split a table into runs. A new run begins where the steps start again."""
    notes = _count_on(columns)
    judged = np.zeros(columns.rows, bool)
    for name, (at, _) in columns.values.items():
        if whole(name) or parameter_of(name):
            judged[at] = True
    lines = np.flatnonzero(judged) if judged.any() else np.arange(columns.rows)
    clock, steps = _clock(columns, lines)
    if not len(lines):
        return [Recording(form=columns.form, series={}, rows=columns.rows, clock=clock, odd=columns.odd)]
    epochs = next((series for name, series in columns.values.items() if plain(name) in EPOCHS), None)
    of_epoch = _carried(epochs, columns.rows)[lines] if epochs is not None else None
    timeline = steps[lines] if clock else of_epoch
    cuts = _starts(timeline) if timeline is not None and (clock or len(np.unique(timeline)) > 2) else []
    if clock and cuts and of_epoch is not None and all(of_epoch[cut] > of_epoch[cut - 1] for cut in cuts):
        written = steps.copy()
        for cut in cuts:  # the steps of an epoch are counted from its start, 0 or later
            begun = lines[cut]
            steps[begun:] += steps[begun - 1] + max(written[begun], 1) - steps[begun]
        cuts = []
        notes.append(f"{clock} restarts in each epoch, so Lamina keeps counting")
    bounds = [0, *(int(lines[cut]) for cut in cuts), columns.rows]
    return [_one(columns, steps, clock, notes, *ends) for ends in pairwise(bounds)]


def _count_on(columns: Columns) -> list[str]:
    """Change steps that restart in each epoch to steps of the whole training, and return notes for the user."""
    (at, steps), (known, of) = (columns.values.get(name, _NOTHING) for name in ("step", EPOCH_STEPS))
    epochs = next((series for name, series in columns.values.items() if plain(name) in EPOCHS), None)
    if epochs is None or not len(known) or not _is_whole(epochs[1]):
        return []
    epoch, of = (_carried(series, columns.rows)[at] for series in (epochs, (known, of)))
    epoch = epoch - (at < epochs[0][0])  # a log that begins within an epoch
    moves = np.diff(epoch)
    if not (moves > 0).any() or (np.diff(steps)[moves > 0] > 0).any() or (np.diff(of)[moves >= 0] != 0).any():
        return []
    columns.values["step"] = at, steps + (epoch - min(epoch.min(), 1.0)) * of  # epochs count from 0 or from 1
    lengths = " or ".join(f"{length:g}" for length in dict.fromkeys(of.tolist()))
    return [f"the steps restart in each epoch of {lengths} steps, so Lamina keeps counting"]


def _one(columns: Columns, steps: Ints, clock: str, notes: Sequence[str], first: int, last: int) -> Recording:
    series, gone, stands = {}, 0, plain(clock) == "progress_bar"
    orders: dict[int, tuple[slice, Bools, Ints, Ints, int]] = {}  # of lines that columns share
    for name, (at, of) in columns.values.items():
        if plain(name) in STEPS or plain(name) in TIMES or name == clock:
            continue
        if id(at) not in orders:
            inside = slice(*np.searchsorted(at, (first, last)))
            steps_inside = steps[at[inside]]
            kept = _latest(steps_inside)
            order = np.argsort(steps_inside[kept], kind="stable")
            left = int((~kept).sum()) if stands or (np.diff(steps_inside) < 0).any() else 0
            orders[id(at)] = inside, kept, order, steps_inside[kept][order], left
        inside, kept, order, ordered, left = orders[id(at)]
        if left > gone and (whole(name) or parameter_of(name)):
            gone = left
        if len(ordered):
            series[name] = (ordered, of[inside][kept][order])
    why = "the progress bar stands still" if stands else "the steps go back"
    again = f"{why}, so Lamina skips {gone} records that later records replace"
    return Recording(
        form=columns.form,
        series=series,
        rows=last - first,
        clock=clock,
        notes=[*notes, *([again] if gone else [])],
        odd=columns.odd,
    )


def _latest(steps: Ints) -> Bools:
    """Return which values to keep. A later line with the same step or a smaller step replaces a value."""
    if len(steps) < 2:
        return np.ones(len(steps), bool)
    back = np.diff(steps) < 0
    # in shuffled steps, only a later line with the same step replaces a value
    if back.mean() > _SHUFFLED:
        unique = np.zeros(len(steps), bool)
        unique[[len(steps) - 1 - at for at in np.unique(steps[::-1], return_index=True)[1]]] = True
        return unique
    later = np.minimum.accumulate(steps[::-1])[::-1]
    return np.append(steps[:-1] < later[1:], True)


def _clock(columns: Columns, lines: Ints) -> tuple[str, Ints]:
    """Return the name of the column with the steps and each line's step, or "" and the line numbers."""
    named = [(rank, name) for name in columns.values if (rank := step_rank(name)) is not None]
    epochs = next((series for name, series in columns.values.items() if plain(name) in EPOCHS), None)
    candidates = []
    ranked = [  # of columns alike, one that does not go back, and that tells the most lines apart
        (rank, bool((np.diff(of := columns.values[name][1]) < 0).any()), -len(np.unique(of)), name != "step", name)
        for rank, name in named
    ]
    for *_, name in sorted(ranked):
        at, of = columns.values[name]
        if np.isfinite(of).all() and (np.abs(of) > _MOST).any():
            raise UserError(f"step {np.abs(of).max():.0e} in the column {name!r} is too large. Give steps up to 2^53.")
        if not _is_whole(of):
            continue
        steps = _carried((at, of), columns.rows).astype(np.int64)
        if plain(name) == "progress_bar" and len(of) > 1:  # records that a console shows before its first bar
            early = lines[lines < at[0]]
            counted = of[0] - (of[1] - of[0]) * np.arange(len(early), 0, -1)
            steps[early] = np.where(counted >= 0, counted, of[0])
            steps[lines] = _on_time(steps[lines])
        different = len(np.unique(steps[lines]))
        if 1 < different < len(lines) and epochs is not None and plain(name) != "progress_bar":
            epoch = np.floor(_carried(epochs, columns.rows)[lines])
            different = len(np.unique(epoch * (steps.max() + 1.0) + steps[lines]))
        covered = float(np.isin(lines, at).mean()) if len(lines) else 0.0
        least = _OWN if plain(name) == "progress_bar" else _DIFFERENT if covered >= _COMMON else _RARE
        if different > min(1, len(lines) - 1) and different >= least * len(lines):
            candidates.append((covered, name, steps))
    usable = [candidate for candidate in candidates if candidate[0] >= _COVERED * max(each[0] for each in candidates)]
    ordered = [candidate for candidate in usable if not _starts(candidate[2][lines])] or [
        candidate for candidate in usable if plain(candidate[1]) != "progress_bar"
    ]
    if ordered:
        return ordered[0][1], ordered[0][2]
    for name in columns.values:
        if plain(name) in EPOCHS and _is_whole(columns.values[name][1]) and len(lines):
            epochs = _carried(columns.values[name], columns.rows).astype(np.int64)
            moves = np.diff(epochs[lines])  # a line for each epoch, but for a few that a resumed run repeats
            if (moves >= 0).all() and (moves > 0).mean() >= _COVERED if len(moves) else name == "epoch":
                return name, epochs
    count = np.zeros(columns.rows, np.int64)
    count[lines] = 1
    return "", np.cumsum(count)


def _on_time(bar: Ints) -> Ints:
    """Return the true steps of records that a trainer printed beside a progress bar that lags behind."""
    begun, shown = np.split(bar, [int(len(bar) > 0 and bar[0] == 1)])  # logging_first_step
    if len(shown) < _SHOWN or (apart := round((shown[-1] - shown[0]) / (len(shown) - 1))) < 1:
        return bar
    # the true steps are multiples of a constant
    steps = apart * (-(-shown[0] // apart) + np.arange(len(shown)))
    lag = steps - shown
    return np.concatenate([begun, steps]) if lag.min() == 0 and lag.max() <= apart else bar


def _is_whole(values: Floats) -> bool:
    return bool(np.isfinite(values).all() and (values == np.round(values)).all())


def _carried(series: Series, rows: int) -> Floats:
    at, of = series
    last = np.searchsorted(at, np.arange(rows), side="right") - 1
    return of[np.maximum(last, 0)]


def _starts(steps: Ints | Floats) -> list[int]:
    """Return the lines at which the steps go back to the run's first steps."""
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
