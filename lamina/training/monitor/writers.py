"""The records of a run: metrics.jsonl and the tables in layers/."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lamina.core.json_types import Json
from lamina.jobs import digests
from lamina.jobs.columns import SCORES
from lamina.jobs.files import finite, write_text, writing
from lamina.jobs.manifest import entry_of, sync
from lamina.training.checkpointing.stateful import RunState
from lamina.training.monitor.rows import Evaluation

logger = logging.getLogger(__name__)

LAYER_COLUMNS = ("step", "layer", "sublayer", "role", "index", "metric", "value")


class MetricsWriter:
    """metrics.jsonl: one line per record, written at once.

    Args:
        folder: the run's.
        rollbacks: the records of the rollbacks so far.
    """

    def __init__(self, folder: Path, rollbacks: Iterable[Mapping[str, Any]] = ()):
        self.path, self.rollbacks = folder / "metrics.jsonl", tuple(rollbacks)
        self.best_eval = math.inf
        self.evaluation = Evaluation()  # the last one of an earlier process
        self.tokens_before = 0  # in the records of an earlier process
        self._sum, self._size = hashlib.sha256(), 0  # of the file
        self._records, self._count = hashlib.sha256(), 0  # of its records but the rollbacks', by step
        self._unsynced = 0

    def state_dict(self) -> Json:
        """The number of records, without the rollbacks', and their SHA-256."""
        return {"records": (self._count, self._records.hexdigest())}

    def load_state_dict(self, state: RunState) -> None:
        """Resume: drop records later than the checkpoint, and check those that it knows."""
        logged_step = int(state.get("logged_step", 0))
        if "step" not in state or not (self.path.exists() or logged_step):
            return
        lines = _known_lines(self.path, state["step"], state.get("records"))
        for line in lines:
            self._count_in(line)
        lines += [
            json.dumps(finite(dict(record))) for record in self.rollbacks
        ]  # they stay, however far one rolls back
        lines.sort(key=_step)
        last = max((_step(line) for line in lines if "loss" in json.loads(line)), default=0)
        if last < logged_step:
            logger.warning("%s: its records of steps %d to %d are gone", self.path, last + 1, logged_step)
        text = "".join(f"{line}\n" for line in lines)
        write_text(self.path, text)
        self._sum.update(text.encode())
        self._size = len(text.encode())
        records = [json.loads(line) for line in lines]
        self.tokens_before = max((record["tokens"] for record in records if record.get("tokens")), default=0)
        self.evaluation, self.best_eval = _evaluations(records)

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(finite(dict(record)))
        content = f"{line}\n".encode()
        self._sum.update(content)
        self._size += len(content)
        self._count_in(line)
        digests.note(self.path, (self._size, self._sum.hexdigest()), sync=False)
        with self.path.open("ab") as file:
            file.write(content)
        self._unsynced += 1
        if self._unsynced == 1000:
            self.sync()

    def sync(self) -> None:
        """Sync the file to disk."""
        if self.path.exists():
            sync(self.path)
            digests.rewrite(self.path.parent)
        self._unsynced = 0

    def _count_in(self, line: str) -> None:
        self._records.update(f"{line}\n".encode())
        self._count += 1


def _evaluations(records: list[Json]) -> tuple[Evaluation, float]:
    """The last evaluation that records hold, and the best loss."""
    evaluated = [record for record in records if "eval_loss" in record]
    best = min((record["eval_loss"] for record in evaluated if record["eval_loss"] is not None), default=math.inf)
    last: Json = evaluated[-1] if evaluated else {"step": -1, "eval_loss": math.inf}
    later = {name: value for record in records for name, value in record.items() if value is not None}
    evaluation = Evaluation(
        step=last["step"],
        loss=math.nan if last["eval_loss"] is None else last["eval_loss"],
        second=later.get("eval_corpus_loss"),
        scores={name: last[name] for name in SCORES if name in last},
        tasks=later.get("tasks"),
    )
    return evaluation, best


def _known_lines(path: Path, step: int, known: tuple[int, str] | None) -> list[str]:
    """The records up to ``step`` by step, without the rollbacks'; a file that differs from ``known`` is set aside."""
    everything = _lines(path)
    lines = [line for line in everything if _step(line) <= step]
    lines = sorted((line for line in lines if "rollback" not in json.loads(line)), key=_step)
    if known is not None:
        count, digest = known
        once = list(dict.fromkeys(lines))  # without duplicated lines
        lines = once if digest_of(once[:count]) == digest else lines
        altered = digest_of(lines[:count]) != digest
        lines = lines if altered else lines[:count]  # what follows the checkpoint is recorded again
    else:
        altered = any(_step(line) == math.inf for line in everything[:-1])  # a kill cuts only the last line
    if altered and path.exists():
        set_aside(path, copy=True)
    return lines


def digest_of(lines: Iterable[str]) -> str:
    """The SHA-256 of lines, each with its newline."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def keep_abandoned(folder: Path, step: int, number: int) -> None:
    """Copy the records after ``step`` to metrics-rollback-NUMBER.jsonl: a rollback removes them from metrics.jsonl."""
    lines = _lines(folder / "metrics.jsonl")
    gone = [line for line in lines if step < _step(line) < math.inf]
    write_text(folder / f"metrics-rollback-{number}.jsonl", "".join(f"{line}\n" for line in gone))


class NoWriter:
    """Replaces the writers in every process but the first."""

    best_eval = math.inf
    evaluation = Evaluation()

    def write(self, record: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def state_dict(self) -> Json:
        return {}

    def load_state_dict(self, state: RunState) -> None: ...

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None: ...

    def flush(self) -> None: ...


def set_aside(path: Path, *, copy: bool = False) -> None:
    """Move (or copy) a damaged file of a run to NAME.damaged, where nothing reads it, and log that."""
    aside = path.with_name(f"{path.name}.damaged")
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)  # a link would be followed
    if copy:
        shutil.copyfile(path, aside)
    else:
        digests.note(path, None)
        os.replace(path, aside)
    logger.warning("%s is altered: kept as %s, what can't be read of it is left out", path, aside.name)


def _lines(path: Path) -> list[str]:
    return [_text(line) for line in path.read_bytes().split(b"\n") if line] if path.is_file() else []


def checked_parts(folder: Path, pattern: str, files: Mapping[str, Any] | None) -> list[Path]:
    """The intact parts of a run's table, by a checkpoint: altered parts are set aside, missing ones are logged.

    Args:
        folder: the run's.
        pattern: the glob pattern of the parts, relative to the folder.
        files: the checkpoint's sizes and digests; None if it has none, and then all parts count as intact.
    """
    parts = sorted(folder.glob(pattern))
    if files is None:
        return parts
    expected = {name: tuple(entry) for name, entry in files.items() if Path(name).match(pattern)}
    for name in expected:
        if not (folder / name).exists():
            logger.warning("%s is missing: what it held is left out", folder / name)
    for part in parts:
        name = part.relative_to(folder).as_posix()
        if name in expected and (not part.is_file() or entry_of(part) != expected[name]):
            set_aside(part)
    return [part for part in parts if part.exists()]


def _number(part: Path) -> int:
    number = part.stem.removeprefix("part-")
    return int(number) if number.isdecimal() else -1


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return ""  # not a record


def _step(line: str) -> float:
    """The step of a record; infinite for a partial or altered line, which is dropped."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


class LayersWriter:
    """layers/part-*.parquet: rows are collected and written in parts, so that a kill loses at most the last part."""

    rows_per_part = 20_000

    def __init__(self, folder: Path):
        self.run, self.folder = folder, folder / "layers"
        self.folder.mkdir(exist_ok=True)
        self.rows: list[tuple[Any, ...]] = []
        self.next = 1 + max(map(_number, self.folder.glob("part-*.parquet")), default=-1)

    def state_dict(self) -> Json:
        """The sizes and digests of the run's files, including these parts; call it once they are on disk."""
        return {"files": digests.entries(self.run)}

    def load_state_dict(self, state: RunState) -> None:
        """Resume: drop rows later than the checkpoint, and set aside parts that differ from what it lists."""
        files = state.get("files")
        parts = checked_parts(self.run, "layers/part-*.parquet", files)
        self.next = 1 + max(map(_number, parts), default=-1)
        for part in parts if "step" in state else ():
            self._trim(part, state["step"], known=files is None or part.relative_to(self.run).as_posix() in files)

    def _trim(self, part: Path, step: int, *, known: bool) -> None:
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        try:
            with part.open("rb") as file:  # a path with a colon would be read as a URI
                table = pq.read_table(file)
            rows = table.filter(ds.field("step") <= step)
        except (OSError, ValueError):  # ArrowInvalid is a ValueError
            set_aside(part)
            return
        if rows.num_rows == 0:
            digests.remove(part)
        elif not known:
            # The parts that the checkpoint lists hold all measurements up to it. So this part repeats them (a
            # divergence records its last rows again), or the run did not write it.
            if digests.differs(part):
                set_aside(part)
            else:
                digests.remove(part)
        elif rows.num_rows < table.num_rows:
            self._write(part, rows)

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows of (step, layer, sublayer, role, index, metric, value)."""
        self.rows += rows
        if len(self.rows) >= self.rows_per_part:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows as one part."""
        import pyarrow as pa

        if not self.rows:
            return
        types = (pa.int64(), pa.int32(), pa.string(), pa.string(), pa.int32(), pa.string(), pa.float64())
        columns = [pa.array(c, t) for c, t in zip(zip(*self.rows, strict=True), types, strict=True)]
        self._write(self.folder / f"part-{self.next:05d}.parquet", pa.table(columns, names=list(LAYER_COLUMNS)))
        self.rows, self.next = [], self.next + 1

    @staticmethod
    def _write(path: Path, table: Any) -> None:
        import pyarrow.parquet as pq

        with writing(path) as temporary, temporary.open("wb") as file:
            pq.write_table(table, file)
