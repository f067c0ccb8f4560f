"""Read numbers without column names, and find the texts that a notebook has printed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

from lamina.errors import UserError
from lamina.reports.histories.names import parameter_of, whole, words_of
from lamina.reports.histories.numbers import number_of
from lamina.reports.histories.recordings import Columns

Cell: TypeAlias = Any
"""A notebook's cell."""

WALL = 1e9  # seconds since 1970: a time, and no step
_VALUES = {"value", "values", "train", "training", "y"}
"""Column names that do not name a quantity."""


def named_by_file(columns: Columns, stem: str) -> Columns:
    """If the file's name means a loss, rename the only column of values to this name (TensorBoard's Value)."""
    if whole(stem) is None or any(whole(name) or parameter_of(name) for name in columns.values):
        return columns
    named = [name for name in columns.values if _VALUES.issuperset(words_of(name) or [name])]
    if len(named) != 1:
        return columns
    return replace(
        columns, values={stem if name == named[0] else name: series for name, series in columns.values.items()}
    )


def rows_of(lines: Sequence[str]) -> list[list[str]]:
    """Return the cells of lines that hold equally many numbers and nothing else, or [] for any other text."""
    if not lines or number_of(re.split(r"[\s,;|]+", lines[0].strip())[0]) is None:  # most texts
        return []
    rows = [re.split(r"[\s,;|]+", line.strip()) for line in lines]
    same = len({len(row) for row in rows}) == 1 and (len(rows) > 1 or len(rows[0]) == 3)  # MLflow: time, value, step
    return rows if same and all(number_of(cell) is not None for row in rows for cell in row) else []


def without_names(rows: Sequence[Sequence[object]], stem: str) -> Iterator[Mapping[str, object]]:
    """Yield the records in rows without names, if the file is named after a loss. Raises UserError for other rows."""
    columns = [[number_of(cell) for cell in column] for column in zip(*rows, strict=True)]
    count = f"{len(columns)} column{'s' * (len(columns) > 1)} of numbers without names"
    numbers = [[number for number in column if number is not None] for column in columns]
    wholes = [
        bool(column) and all(map(float.is_integer, column)) and all(a <= b for a, b in pairwise(column))
        for column in numbers
    ]
    times = [
        is_whole and len(columns) > 2 and column[0] > WALL for is_whole, column in zip(wholes, numbers, strict=True)
    ]
    steps = [
        is_whole and not time and len(set(column)) == len(column)
        for is_whole, time, column in zip(wholes, times, numbers, strict=True)
    ]
    values = [at for at in range(len(columns)) if not times[at] and not steps[at]]
    if len(values) != 1 or sum(steps) > 1 or whole(stem) is None or len(numbers[values[0]]) < len(rows):
        raise UserError(count, 'Write the names into the first line, such as "step,loss".')
    step = steps.index(True) if True in steps else None
    for at in range(len(rows)):
        yield {stem: columns[values[0]][at], **({} if step is None else {"step": columns[step][at]})}


def shown_in(cell: Cell) -> Iterator[str]:
    """Yield the texts that a notebook's cell shows: its printed lines, and each table."""
    outputs = cell.get("outputs") or ()
    if printed := "".join("".join(output.get("text", ())) for output in outputs):
        yield printed
    for output in outputs:
        table = "".join((output.get("data") or {}).get("text/html", ()))
        rows = [re.findall(r"(?s)<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"(?s)<tr.*?</tr>", table)]
        if rows:
            yield "\n".join("\t".join(html.unescape(cell).strip() for cell in row) for row in rows)
