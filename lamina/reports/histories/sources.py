"""Read runs from the files and folders of other tools."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import logging
import math
import os
import re
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lamina.core.extras import install
from lamina.core.json_types import Json
from lamina.errors import UserError, one_line
from lamina.jobs.names import CONFIG
from lamina.reports.histories.consoles import form_of, lines_of, records_of
from lamina.reports.histories.names import RUNS, STEPS, parameter_of, plain, step_rank, whole
from lamina.reports.histories.numbers import has_comma, is_numeric, number_of
from lamina.reports.histories.recordings import Columns, Recording, add_commas, of_lines, of_points, runs_of
from lamina.reports.histories.unnamed import WALL, named_by_file, rows_of, shown_in, without_names

logger = logging.getLogger(__name__)

Proto: TypeAlias = Any
"""An object of another package, such as a W&B message or a pandas table."""

_FILES = (
    "trainer_state.json",
    "checkpoint-*/trainer_state.json",
    "*/checkpoint-*/trainer_state.json",
    "trainer_log.jsonl",
    "logging.jsonl",
    "*/logging.jsonl",
    "metrics.csv",
    "version_*/metrics.csv",
    "*metrics*.jsonl",
    "train_log.jsonl",
)
"""Patterns of files in trainers' folders. Lamina uses the first pattern that matches a file."""
_TRACKED = ("*.wandb", "events.out.tfevents.*")
_ZIPPED = b"\x1f\x8b"
_SAID = 5.0  # seconds after which a reader says how far it is
_LARGE, _LONGEST = 2**20, 2**26  # bytes from which a file is read in pieces, and of a line


def recorded_in(folder: Path) -> Path | None:
    """Return the path to read in another tool's folder (a trainer's file, a database or the folder itself), or None."""
    if (folder / CONFIG).exists() and (folder / "layers").exists():
        return None
    if files := runs_in(folder):
        return files[0]
    databases = list(folder.glob("*.db"))
    if len(databases) == 1:
        return databases[0]
    return folder if databases or tracked(folder) else None


def runs_in(folder: Path) -> list[Path]:
    """Return the latest file of each run in a trainer's folder. The run with the highest number comes first."""
    newest: dict[Path, Path] = {}
    for pattern in _FILES:
        for path in sorted(folder.glob(pattern), key=_age):
            run = path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent
            newest[run] = path
        if newest:
            break
    return sorted(newest.values(), key=_age, reverse=True)


def _age(path: Path) -> tuple[int, float]:
    number = re.search(r"(?:checkpoint-|version_)(\d+)$", path.parent.name)
    return int(number[1]) if number else -1, path.stat().st_mtime


def tracked(folder: Path) -> list[Path]:
    """Return W&B's and TensorBoard's files in a folder and its subfolders."""
    return sorted(path for pattern in _TRACKED for path in folder.rglob(pattern))


def read_runs(path: Path) -> dict[str, Recording]:
    """Return the runs in a file, a folder or a pipe ("-"), by name. Raises UserError if Lamina cannot read the path."""
    try:
        if path.suffix == ".ipynb":
            return _notebook(path.read_bytes())
        if str(path) == "-":
            data = sys.stdin.buffer.read()
            is_notebook = data.lstrip()[:1] == b"{" and b'"nbformat"' in data and b'"cells"' in data
            return _notebook(data) if is_notebook else runs_of(_of_text(data, "the pipe"))
        if path.is_dir():
            return _of_folder(path)
        if path.suffix == ".wandb":
            return runs_of(of_lines(_wandb(path), "W&B's offline run"))
        if "tfevents" in path.name:
            return {"1": of_points(_tensorboard(path), "TensorBoard's event file")}
        with path.open("rb") as file:
            start = file.read(15)
        if path.suffix == ".db" or start == b"SQLite format 3":
            return runs_of(of_lines(_trackio(path), "trackio's database"))
        large = path.stat().st_size > _LARGE
        if large and (columns := _long(path)) is not None:
            return runs_of(columns)
        large = large and re.search(r"\.[ct]sv(\.gz)?$", path.name.lower()) is not None
        columns = _wide(path) if large and find_spec("pandas") else _of_text(path.read_bytes(), path.stem)
        return runs_of(named_by_file(columns, path.stem))
    except ModuleNotFoundError as error:
        name = "wandb" if str(error.name).startswith(("wandb", "google")) else "tensorboard"
        raise UserError(f"run: {str(path)!r} needs {name}. Run: {install(name)}") from None
    except UserError as error:
        raise UserError(f"run: {str(path)!r}: {error}") from None
    except (
        EOFError, zlib.error, OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError, csv.Error,
        sqlite3.Error,
    ) as error:  # fmt: skip
        raise UserError(f"run: {str(path)!r} is not readable ({one_line(error)})") from None


def _of_folder(folder: Path) -> dict[str, Recording]:
    files = sorted(folder.glob("*.db")) or tracked(folder)
    places = sorted({file.parent for file in files})
    whole_runs = sum(file.suffix in (".wandb", ".db") for file in files)
    if not all(place.is_relative_to(places[0]) for place in places) or whole_runs > 1:
        runs = files if len(places) == 1 else places
        listed = ", ".join(map(str, runs[:5])) + f" and {len(runs) - 5} more" * (len(runs) > 5)
        raise UserError(f"the folder holds {len(runs)} runs. Give one of {listed}.")
    runs = [read_runs(file) for file in files]
    if len(runs) == 1:
        return runs[0]
    points = (
        (name, step, value)
        for run in runs
        for series in run.values()
        for name, (steps, values) in series.series.items()
        for step, value in zip(steps.tolist(), values.tolist(), strict=True)
    )
    return {"1": of_points(points, f"TensorBoard's event files ({len(files)})")}


def _notebook(data: bytes) -> dict[str, Recording]:
    """Read the runs that the cells of a notebook have printed."""
    runs = dict[str, Recording]()
    for number, cell in enumerate(json.loads(_text(data)).get("cells", ()), start=1):
        for text in shown_in(cell):
            try:
                read = runs_of(_of_text(text.encode(), f"cell {number}"))
            except (UserError, ValueError):  # an output of something else
                continue
            for name, run in read.items():
                if any(whole(each) or parameter_of(each) for each in run.series):
                    label = f"cell {number}" if f"cell {number}" not in runs else f"cell {number}, {len(runs)}"
                    runs[label if len(read) == 1 else f"{label}, {name}"] = replace(run, form=f"{run.form} in {label}")
    if not runs:
        raise UserError("the outputs of this notebook have no loss and no gradient norm", "Give the run's log.")
    return runs


def _text(data: bytes) -> str:
    if data[:2] == _ZIPPED:
        data = gzip.decompress(data)
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # as PowerShell writes what it is piped
    return data.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def _of_text(data: bytes, name: str) -> Columns:
    """Read a text as JSON, JSON lines, a table or a console's lines, whichever fits."""
    text = _text(data)
    start = text.lstrip()[:1]
    if start in ("{", "["):
        try:
            return of_lines(_records(json.loads(text), name), "JSON")
        except json.JSONDecodeError as error:
            parts = (part[0] for part in re.finditer(r"[^\n]+", text))  # which takes no memory for all of them
            columns = of_lines(_json_lines(_Reading(name, len(text)).over(parts)), "JSON lines")
            if columns.rows and columns.rows >= text.count("\n") / 2:
                return columns
            whole = error
    else:
        whole = None
    if (table := _table(text)) is not None:
        return table
    lines = list(lines_of(text))
    if (form := form_of(lines)) is not None:
        told = _Reading(name, sum(map(len, lines)))
        return of_lines(records_of(form, told.over(lines)), form.name)
    if records := list(_below_headers(lines)):
        return of_lines(records, "tables below repeated headers")
    if rows := rows_of(lines):
        return of_lines(without_names(rows, name), "numbers without names")
    if whole is not None and re.match(r"\s*[\[{]\s*[\"\[{]", text):
        raise whole
    raise UserError(
        f"{_not_a_table(text)}Lamina finds no JSON, no table with a header and no lines with a loss or a gradient norm",
        "Give a training log, trainer_state.json, a CSV or JSON history, or files of TensorBoard, W&B or trackio. A "
        'log needs lines such as "step 10 loss 2.3 grad_norm 0.5".',
    )


_TWO_WORDS = re.compile(r"(?i)\b((?:train|valid)\w*) (?=loss\b)")
_SPACY = re.compile(r"^E +# +(?=LOSS |[A-Z_]+ +LOSS )")  # its header's names of the epoch and the step
_YOLO_LOSSES = frozenset(("box", "obj", "cls", "dfl", "seg", "total"))


def _below_headers(lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    """Yield the rows below headers that contain a loss, as in Ultralytics' logs. The last print of a row counts."""
    names, row = list[str](), dict[str, str]()
    for line in lines:
        if _SPACY.match(line):
            line = _SPACY.sub("epoch step ", line).replace("LOSS ", "LOSS_")
        cells = _TWO_WORDS.sub(r"\1_", line).split()
        if len(cells) > 2 and all(re.fullmatch(r"[A-Za-z][\w/.()-]*", cell) for cell in cells):
            if "gpu_mem" in cells:  # YOLOv5 and YOLOv7 call the losses box, obj and cls
                cells = [f"{cell}_loss" if cell in _YOLO_LOSSES else cell for cell in cells]
            names = cells if any("loss" in cell.lower() for cell in cells) else []
        elif names and len(cells) >= len(names) and sum(map(is_numeric, cells[1 : len(names)])) > len(names) / 2:
            new = dict(zip(names, (cell.partition("/")[0] for cell in cells), strict=False))
            first = names[:2] == ["epoch", "step"] and new["step"] == "0"  # spaCy's sum over one batch instead of many
            if first or not is_numeric(new[names[0]]):  # a row of an evaluation
                continue
            if row and (whole(names[0]) or any(new.get(name) != row.get(name) for name in (names[0], "step"))):
                yield row
            row = new
    if row:
        yield row


def _long(path: Path) -> Columns | None:
    """Read a large file of JSON lines, or return None for another format."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(_LONGEST)
        if not first.startswith("{") or not first.endswith("}\n") or next(_json_lines([first]), None) is None:
            return None
        file.seek(0)
        told = _Reading(path.name, path.stat().st_size)
        columns = of_lines(_json_lines(told.over(file)), "JSON lines")
        return columns if columns.rows >= told.lines / 2 else None


def _json_lines(lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    for line in lines:
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # a line that a kill cut short, or of something else
            if isinstance(record, Mapping):
                yield (
                    {**record, **inside}
                    if isinstance(inside := record.get("data") or record.get("metrics"), Mapping)
                    else record
                )


def _records(data: object, name: str) -> Iterator[Mapping[str, object]]:
    """Yield the records in JSON: lists of records, columns, pandas' and TensorBoard's forms, and mappings of these."""
    if isinstance(data, Mapping):
        for inner in ("log_history", "history", "data", "records", "metrics", "logs"):
            if isinstance(data.get(inner), list | Mapping):
                columns = data.get("columns")
                rows = data[inner]
                if isinstance(columns, list) and isinstance(rows, list):
                    rows = [dict(zip(map(str, columns), row, strict=False)) for row in rows if isinstance(row, list)]
                yield from _records(rows, name)
                return
        if any(plain(str(key)) in STEPS and number_of(value) is not None for key, value in data.items()):
            yield data  # the only line
            return
        columns = {str(key): value for key, value in data.items() if isinstance(value, list | Mapping)}
        if not columns and any(number_of(value) is not None for value in data.values()):
            yield data
        longest = max((len(value) for value in columns.values()), default=0)
        for at in range(longest):
            yield {key: value[at] for key, value in columns.items() if isinstance(value, list) and at < len(value)} | {
                key: list(value.values())[at]
                for key, value in columns.items()
                if isinstance(value, Mapping) and at < len(value)
            }
    elif isinstance(data, list):
        threes = bool(data) and all(isinstance(record, list) and len(record) == 3 for record in data)
        if threes and all(isinstance(record[0], int | float) and record[0] > WALL for record in data):
            yield from ({"wall_time": wall, "step": step, name: value} for wall, step, value in data)
        elif data and not any(isinstance(record, Mapping) for record in data):
            yield from without_names([record if isinstance(record, list) else [record] for record in data], name)
        yield from (record for record in data if isinstance(record, Mapping))
    else:
        raise ValueError(f"a {type(data).__name__} instead of records")


_SEPARATORS = (",", ";", "\t", "|")


def _header(first: str) -> tuple[str, list[str]] | None:
    """Return the separator and the names in a table's first line, or None if the line is no header."""
    if "\r" in first:  # of a progress bar
        return None
    separator = max(_SEPARATORS, key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=separator))] if first else []
    named = (not name or (re.search(r"[A-Za-z]", name) and number_of(name) is None) for name in names)
    is_table = len(names) > 1 and any(names) and all(named)
    return (separator, names) if is_table and not any(re.search(r"[:=] *-?\d", name) for name in names) else None


def _table(text: str) -> Columns | None:
    if "|" in text.partition("\n")[0]:  # Markdown has bars around, too, and a line of dashes below the names
        text = "\n".join(line.strip().strip("|") for line in text.splitlines() if re.search(r"\w", line))
    lines = (text := text.lstrip("\r\n")).split("\n", 1)
    lines = [lines[0], lines[1].lstrip("\n").partition("\n")[0]] if len(lines) > 1 else lines
    if (header := _header(lines[0].strip("\r"))) is None:
        spaced = _spaced(text)
        return None if spaced is None else _table(spaced)
    separator, names = header
    second = _cells(lines[1], separator) if len(lines) > 1 else []
    if len(lines) > 1 and lines[1].strip() and (len(second) != len(names) or not any(map(is_numeric, second))):
        return None
    names = [f"{name}.{names[:at].count(name)}" if name in names[:at] else name for at, name in enumerate(names)]
    rows = csv.reader(text.splitlines()[1:], delimiter=separator)
    cells = ({name: cell.strip() for name, cell in zip(names, row, strict=False)} for row in rows)
    return of_lines(cells, "CSV" if separator == "," else f"a table separated by {separator!r}")


def _cells(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def _spaced(text: str) -> str | None:
    """If a text is a table as fastai prints it, return it with tabs between the columns, otherwise None."""
    lines = [line for line in text.splitlines() if line.strip()]
    lines[:1] = [_TWO_WORDS.sub(r"\1_", line) for line in lines[:1]]
    for gap in (r"\s{2,}", r"\s+"):
        first, second = (re.split(gap, line.strip()) for line in (*lines[:2], "", "")[:2])
        words = all(re.fullmatch(r"[A-Za-z][\w /.#()-]*:?", name) for name in first)
        if len(first) > 1 and words and len(second) == len(first) and sum(map(is_numeric, second)) > len(second) / 2:
            return "\n".join("\t".join(cell.strip(":") for cell in re.split(gap, line.strip())) for line in lines)
    return None


def _not_a_table(text: str) -> str:
    """If decimal commas split the cells of a table, return a sentence about the commas, otherwise ""."""
    first, second = (*text.splitlines()[:2], "", "")[:2]
    header = _header(first)
    if header is None or header[0] != "," or not (cells := _cells(second, ",")) or len(cells) <= len(header[1]):
        return ""
    return (
        f"the first row has {len(cells)} cells, but the header has {len(header[1])} cells. If the row's numbers have "
        "decimal commas, write decimal points, or separate the cells by ';'. "
    )


def _wide(path: Path) -> Columns:
    """Read a large table in pieces, by column, and report the progress."""
    import pandas as pd

    with path.open("rb") as file:
        zipped = file.read(2) == _ZIPPED
    with gzip.open(path) if zipped else path.open("rb") as file:
        first = file.readline(_LONGEST).decode("utf-8-sig", errors="replace").rstrip("\r\n")
    if "\ufffd" in first or (header := _header(first)) is None:  # another encoding
        return _of_text(path.read_bytes(), path.stem)
    separator, names = header
    columns, parts = Columns(form="CSV" if separator == "," else f"a table separated by {separator!r}"), {}
    commas: dict[str, list[tuple[int, str]]] = {}
    pointed, told = False, _Reading(path.name, path.stat().st_size)
    with path.open("rb") as file:
        pieces: Proto = pd.read_csv(
            file,
            sep=separator,
            compression="gzip" if zipped else None,
            chunksize=max(100, 2**22 // len(names)),
            na_values=[""],
            keep_default_na=False,
            low_memory=False,
            skipinitialspace=True,
            encoding_errors="replace",
        )
        for piece in pieces:
            for label, column in piece.items():
                name, present = str(label).strip(), column.notna().to_numpy()
                if plain(name) in RUNS:
                    of = columns.runs.setdefault(name, {})
                    of.update({columns.rows + at: str(column.iloc[at]) for at in np.flatnonzero(present).tolist()})
                    continue
                if column.dtype.kind not in "fiu":
                    words = column.astype(str).str.strip()
                    shown = words.str.partition("/")[0] if step_rank(name) is not None else words
                    column = _numbers(shown, present)
                    unread = np.flatnonzero(present & column.isna().to_numpy())
                    cells = [(at, text) for at, text in zip(unread.tolist(), shown.iloc[unread], strict=True)]
                    if with_comma := [(columns.rows + at, text) for at, text in cells if has_comma(text)]:
                        commas.setdefault(name, []).extend(with_comma)
                    said = [text for _, text in cells if text.lower() not in ("nan", "-nan") and not has_comma(text)]
                    if said:
                        columns.odd.setdefault(name, said[0][:40])
                    present = present & (column.notna().to_numpy() | words.str.lower().isin(["nan", "-nan"]).to_numpy())
                pointed |= column.dtype.kind == "f"
                if present.any():
                    at = None if present.all() else np.flatnonzero(present) + columns.rows
                    parts.setdefault(name, []).append((columns.rows, at, column.to_numpy(np.float64)[present]))
            columns.rows += len(piece)
            told.say(file.tell())
    every = np.arange(columns.rows)
    for name in list(parts):
        part = parts.pop(name)
        values = np.concatenate([of for _, _, of in part])
        lines = [np.arange(begun, begun + len(of)) if at is None else at for begun, at, of in part]
        columns.values[name] = (every if len(values) == columns.rows else np.concatenate(lines), values)
    columns.odd = {name: text for name, text in columns.odd.items() if name not in columns.values}
    add_commas(columns, commas, points=pointed)
    return columns


def _numbers(words: Proto, present: np.ndarray) -> Proto:
    import pandas as pd

    numbers: Proto = pd.to_numeric(words, errors="coerce")
    for at in np.flatnonzero(present & numbers.isna().to_numpy()).tolist():
        if not has_comma(text := words.iloc[at]) and (number := number_of(text)) is not None:
            numbers.iloc[at] = number
    return numbers


class _Reading:
    """Report the progress of reading a large file on standard error."""

    def __init__(self, name: str, size: int):
        self.name, self.size, self.last = name, size, os.times().elapsed
        self.lines = 0

    def say(self, done: int) -> None:
        if (now := os.times().elapsed) > self.last + _SAID:
            self.last = now
            logger.warning("%s: %.0f %% read", self.name, 100 * done / max(1, self.size))

    def over(self, lines: Iterable[str]) -> Iterator[str]:
        done = 0
        for self.lines, line in enumerate(lines, start=1):
            if self.lines % 1000 == 0:
                self.say(done)
            done += len(line)
            yield line


def _trackio(path: Path) -> Iterator[Json]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
        if not {"run_name", "step", "metrics"} <= columns:
            raise ValueError("a database without trackio's table of metrics")
        for run, step, metrics in database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY run_name, step, id"
        ):
            yield {**json.loads(metrics), "run_name": run, "_step": step}


def _wandb(path: Path) -> Iterator[Json]:
    messages: Proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    damaged = importlib.import_module("google.protobuf.message").DecodeError
    for data in _records_of(path.read_bytes()):
        record: Proto = messages.Record()
        try:
            record.ParseFromString(data)
        except damaged as error:
            raise ValueError(str(error)) from error
        if record.WhichOneof("record_type") == "history":
            line: Json = {"_step": record.history.step.num}
            for item in record.history.item:
                name, *inside = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                line[name] = {**line.get(name, {}), inside[0]: value} if inside else value  # a histogram's fields
            yield line


_BLOCK, _HEAD = 32_768, 7
_WHOLE_RECORD, _LAST_PART = 1, 4


def _records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file, which has LevelDB's log format. An incomplete last record is left out."""
    if not data.startswith(b":W&B"):
        raise ValueError("no file of W&B's")
    at, record = _HEAD, b""
    while at + _HEAD <= len(data):
        # a part (checksum, length, kind, bytes) never crosses a block
        if (left := _BLOCK - at % _BLOCK) < _HEAD:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += _HEAD + length
        if at > len(data):
            return
        record += data[at - length : at]
        if kind in (_WHOLE_RECORD, _LAST_PART):
            yield record
            record = b""


def _tensorboard(path: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            if kind == "simple_value":
                yield value.tag, event.step, value.simple_value
            elif kind == "histo":
                yield value.tag, event.step, math.sqrt(value.histo.sum_squares)
            elif kind == "tensor" and (array := make_ndarray(value.tensor)).size == 1 and array.dtype.kind in "fiu":
                yield value.tag, event.step, float(array.item())  # else a text
