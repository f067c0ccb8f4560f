"""The records of a run: metrics.jsonl and the tables in layers/."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lamina.core.json_types import Json
from lamina.jobs.columns import SCORES
from lamina.jobs.files import finite, write_lines, writing
from lamina.jobs.manifest import sync
from lamina.jobs.names import METRICS
from lamina.jobs.run_folder import RunFolder
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.monitor.rows import LastEvaluation

logger = logging.getLogger(__name__)

LAYER_COLUMNS = ("step", "layer", "sublayer", "role", "index", "metric", "value")


class MetricsWriter:
    """metrics.jsonl: one line per record, written at once.

    Args:
        folder: the run's.
        rollbacks: the records of the rollbacks so far.
    """

    def __init__(self, folder: Path, rollbacks: Iterable[Mapping[str, Any]] = ()):
        self.path, self.rollbacks = folder / METRICS, tuple(rollbacks)
        self.best_eval = math.inf
        self.evaluation = LastEvaluation()  # the last one of an earlier process
        self.tokens_before = 0  # in the records of an earlier process
        self._unsynced = 0

    def load_state_dict(self, state: RunState) -> None:
        """Resume: drop records later than the checkpoint."""
        logged_step = int(state.get("logged_step", 0))
        if "step" not in state or not (self.path.exists() or logged_step):
            return
        records = [r for r in RunFolder(self.path.parent).metrics if r["step"] <= state["step"] and "rollback" not in r]
        records += [finite(dict(rollback)) for rollback in self.rollbacks]  # they stay, however far one rolls back
        records.sort(key=lambda record: record["step"])
        last = max((record["step"] for record in records if "loss" in record), default=0)
        if last < logged_step:
            logger.warning("%s: its records of steps %d to %d are gone", self.path, last + 1, logged_step)
        write_lines(self.path, records)
        self.tokens_before = max((record["tokens"] for record in records if record.get("tokens")), default=0)
        self.evaluation, self.best_eval = _evaluations(records)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        with self.path.open("ab") as file:
            file.write(f"{json.dumps(finite(dict(record)))}\n".encode())
        self._unsynced += 1
        if self._unsynced == 1000:
            self.sync()

    def sync(self) -> None:
        """Sync the file to disk."""
        if self.path.exists():
            sync(self.path)
        self._unsynced = 0


def _evaluations(records: list[Json]) -> tuple[LastEvaluation, float]:
    """The last evaluation that records hold, and the best loss."""
    evaluated = [record for record in records if "eval_loss" in record]
    best = min((record["eval_loss"] for record in evaluated if record["eval_loss"] is not None), default=math.inf)
    last: Json = evaluated[-1] if evaluated else {"step": -1, "eval_loss": math.inf}
    later = {name: value for record in records for name, value in record.items() if value is not None}
    evaluation = LastEvaluation(
        step=last["step"],
        loss=math.nan if last["eval_loss"] is None else last["eval_loss"],
        second=later.get("eval_corpus_loss"),
        scores={name: last[name] for name in SCORES if name in last},
        tasks=later.get("tasks"),
    )
    return evaluation, best


def keep_abandoned(folder: Path, step: int, number: int) -> None:
    """Copy the records after ``step`` to metrics-rollback-NUMBER.jsonl: a rollback removes them from metrics.jsonl."""
    gone = [record for record in RunFolder(folder).metrics if record["step"] > step]
    write_lines(folder / f"metrics-rollback-{number}.jsonl", gone)


class NoWriter:
    """Replaces the writers in every process but the first."""

    best_eval = math.inf
    evaluation = LastEvaluation()

    def write(self, record: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def parts(self) -> Json:
        return {}

    def load_state_dict(self, state: RunState) -> None: ...

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None: ...

    def flush(self) -> None: ...


def _number(part: Path) -> int:
    number = part.stem.removeprefix("part-")
    return int(number) if number.isdecimal() else -1


class LayersWriter:
    """layers/part-*.parquet: rows are collected and written in parts, so that a kill loses at most the last part."""

    rows_per_part = 20_000

    def __init__(self, folder: Path):
        self.folder = folder / "layers"
        self.folder.mkdir(exist_ok=True)
        self.rows: list[tuple[Any, ...]] = []
        self.next = 1 + max(map(_number, self.folder.glob("part-*.parquet")), default=-1)

    def parts(self) -> Json:
        """Return the part of a checkpoint that says how many parts are on disk."""
        return {"layer_parts": self.next}

    def load_state_dict(self, state: RunState) -> None:
        """Resume: drop rows later than the checkpoint."""
        if "step" not in state:
            return
        for part in sorted(self.folder.glob("part-*.parquet")):
            if "layer_parts" not in state:
                self._trim(part, state["step"])
            elif _number(part) >= state["layer_parts"]:
                part.unlink()
        if missing := state.get("layer_parts", 0) - len(list(self.folder.glob("part-*.parquet"))):
            logger.warning("%s: %d of its parts are missing: what they held is left out", self.folder, missing)
        self.next = state.get("layer_parts", 1 + max(map(_number, self.folder.glob("part-*.parquet")), default=-1))

    def _trim(self, part: Path, step: int) -> None:
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        with part.open("rb") as file:  # a path with a colon would be read as a URI
            table = pq.read_table(file)
        rows = table.filter(ds.field("step") <= step)
        if rows.num_rows == 0:
            part.unlink()
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
