"""The records of a run: metrics.jsonl and the tables in layers/."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lamina.training.folder import finite, write_text

logger = logging.getLogger(__name__)

LAYER_COLUMNS = ("step", "layer", "sublayer", "role", "index", "metric", "value")


class MetricsWriter:
    """metrics.jsonl: a line a record, written through at once.

    Args:
        folder: the run's.
        resumed_step: of the checkpoint that the run goes on from, after which no record stays; None for a new run.
        returns: records of the rollbacks so far.
        logged_step: the last step that was logged before that checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        resumed_step: int | None,
        returns: Iterable[Mapping[str, Any]] = (),
        logged_step: int = 0,
    ):
        self.path, self.best_eval = folder / "metrics.jsonl", math.inf
        self.last_eval: tuple[int, float] = (-1, math.inf)
        if resumed_step is not None and (self.path.exists() or logged_step):
            lines = _lines(self.path)
            if any(_step(line) == math.inf for line in lines[:-1]):  # a kill cuts the last one only
                set_aside(self.path, copy=True)
            kept = [line for line in lines if _step(line) <= resumed_step]
            kept = [line for line in kept if "rollback" not in json.loads(line)]
            kept += [json.dumps(finite(dict(record))) for record in returns]  # they stay, however far one goes back
            kept.sort(key=_step)
            last = max((_step(line) for line in kept if "loss" in json.loads(line)), default=0)
            if last < logged_step:
                logger.warning("%s: its records of steps %d to %d are gone", self.path, last + 1, logged_step)
            write_text(self.path, "".join(f"{line}\n" for line in kept))
            evals = [(r["step"], r["eval_loss"]) for r in map(json.loads, kept) if "eval_loss" in r]
            self.best_eval = min((loss for _, loss in evals if loss is not None), default=math.inf)
            if evals:
                self.last_eval = (evals[-1][0], math.nan if evals[-1][1] is None else evals[-1][1])

    def write(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(dict(record))) + "\n")

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self.path.exists():
            with self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())


def keep_abandoned(folder: Path, step: int, number: int) -> None:
    """Copy the records after ``step`` to metrics-rollback-NUMBER.jsonl: a return takes them out of metrics.jsonl."""
    lines = _lines(folder / "metrics.jsonl")
    gone = [line for line in lines if step < _step(line) < math.inf]
    write_text(folder / f"metrics-rollback-{number}.jsonl", "".join(f"{line}\n" for line in gone))


class NoWriter:
    """In place of the writers in every process but the first."""

    best_eval = math.inf
    last_eval = (-1, math.inf)

    def write(self, record: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None: ...

    def flush(self) -> None: ...


def set_aside(path: Path, *, copy: bool = False) -> None:
    """Move (or copy) a damaged file of a run to NAME.damaged, where nothing reads it, and say so."""
    aside = path.with_name(f"{path.name}.damaged")
    if copy:
        shutil.copyfile(path, aside)
    else:
        os.replace(path, aside)
    logger.warning("%s is altered: kept as %s, what can't be read of it is left out", path, aside.name)


def _lines(path: Path) -> list[str]:
    return [_text(line) for line in path.read_bytes().split(b"\n") if line] if path.exists() else []


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return ""  # no record


def _step(line: str) -> float:
    """The step of a record; infinite for a torn or altered line, which goes."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


class LayersWriter:
    """layers/part-*.parquet: rows are gathered and written in parts, so that a kill loses at most the last one."""

    rows_a_part = 20_000

    def __init__(self, folder: Path, resumed_step: int | None):
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        self.folder = folder / "layers"
        self.folder.mkdir(exist_ok=True)
        self.rows: list[tuple[Any, ...]] = []
        parts = sorted(self.folder.glob("part-*.parquet"))
        self.next = int(parts[-1].stem.split("-")[1]) + 1 if parts else 0
        for part in parts if resumed_step is not None else ():
            try:
                table = pq.read_table(part.absolute())  # a relative one with a colon would be a URI
            except (OSError, ValueError):  # ArrowInvalid is a ValueError
                set_aside(part)
                continue
            kept = table.filter(ds.field("step") <= resumed_step)
            if kept.num_rows == 0:
                part.unlink()
            elif kept.num_rows < table.num_rows:
                self._write(part, kept)

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Take rows of (step, layer, sublayer, role, index, metric, value)."""
        self.rows += rows
        if len(self.rows) >= self.rows_a_part:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered as one part."""
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

        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that follows rests on it
        os.replace(temporary, path)
