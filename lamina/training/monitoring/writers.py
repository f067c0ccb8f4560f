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

from lamina.jobs import digests
from lamina.jobs.files import finite, write_text
from lamina.jobs.manifest import entry_of, sync

logger = logging.getLogger(__name__)

LAYER_COLUMNS = ("step", "layer", "sublayer", "role", "index", "metric", "value")


class MetricsWriter:
    """metrics.jsonl: one line per record, written through at once.

    Args:
        folder: the run's.
        resumed_step: of the checkpoint that the run goes on from, after which no record stays; None for a new run.
        returns: records of the rollbacks so far.
        logged_step: the last step that was logged before that checkpoint.
        known: that checkpoint's ``known()``; None where it has none.
    """

    def __init__(
        self,
        folder: Path,
        resumed_step: int | None,
        returns: Iterable[Mapping[str, Any]] = (),
        logged_step: int = 0,
        known: tuple[int, str] | None = None,
    ):
        self.path, self.best_eval = folder / "metrics.jsonl", math.inf
        self.last_eval: tuple[int, float] = (-1, math.inf)
        self._sum, self._size = hashlib.sha256(), 0  # of the file
        self._records, self._count = hashlib.sha256(), 0  # of its records but the rollbacks', by step
        self._unsettled = 0
        if resumed_step is not None and (self.path.exists() or logged_step):
            lines = _lines(self.path)
            kept = [line for line in lines if _step(line) <= resumed_step]
            kept = sorted((line for line in kept if "rollback" not in json.loads(line)), key=_step)
            if known is not None:
                once = list(dict.fromkeys(kept))  # lines that were doubled are known by that
                kept = once if digest_of(once[: known[0]]) == known[1] else kept
                altered = digest_of(kept[: known[0]]) != known[1]
                kept = kept if altered else kept[: known[0]]  # what comes after the checkpoint is recorded again
            else:
                altered = any(_step(line) == math.inf for line in lines[:-1])  # a kill cuts the last one only
            if altered and self.path.exists():
                set_aside(self.path, copy=True)
            for line in kept:
                self._count_in(line)
            kept += [json.dumps(finite(dict(record))) for record in returns]  # they stay, however far one goes back
            kept.sort(key=_step)
            last = max((_step(line) for line in kept if "loss" in json.loads(line)), default=0)
            if last < logged_step:
                logger.warning("%s: its records of steps %d to %d are gone", self.path, last + 1, logged_step)
            text = "".join(f"{line}\n" for line in kept)
            write_text(self.path, text)
            self._sum.update(text.encode())
            self._size = len(text.encode())
            evals = [(r["step"], r["eval_loss"]) for r in map(json.loads, kept) if "eval_loss" in r]
            self.best_eval = min((loss for _, loss in evals if loss is not None), default=math.inf)
            if evals:
                self.last_eval = (evals[-1][0], math.nan if evals[-1][1] is None else evals[-1][1])

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(finite(dict(record)))
        content = f"{line}\n".encode()
        self._sum.update(content)
        self._size += len(content)
        self._count_in(line)
        digests.note(self.path, (self._size, self._sum.hexdigest()), settle=False)
        with self.path.open("ab") as file:
            file.write(content)
        self._unsettled += 1
        if self._unsettled == 1000:
            self.sync()

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self.path.exists():
            sync(self.path)
            digests.rewrite(self.path.parent)
        self._unsettled = 0

    def known(self) -> tuple[int, str]:
        """How many records there are beside the rollbacks', and their SHA-256: for a checkpoint."""
        return self._count, self._records.hexdigest()

    def _count_in(self, line: str) -> None:
        self._records.update(f"{line}\n".encode())
        self._count += 1


def digest_of(lines: Iterable[str]) -> str:
    """The SHA-256 of lines, each with its end."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


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

    def known(self) -> tuple[int, str]:
        return 0, ""

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None: ...

    def flush(self) -> None: ...


def set_aside(path: Path, *, copy: bool = False) -> None:
    """Move (or copy) a damaged file of a run to NAME.damaged, where nothing reads it, and say so."""
    aside = path.with_name(f"{path.name}.damaged")
    if aside.is_dir():
        shutil.rmtree(aside)
    if copy:
        shutil.copyfile(path, aside)
    else:
        digests.note(path, None)
        os.replace(path, aside)
    logger.warning("%s is altered: kept as %s, what can't be read of it is left out", path, aside.name)


def _lines(path: Path) -> list[str]:
    return [_text(line) for line in path.read_bytes().split(b"\n") if line] if path.is_file() else []


def checked_parts(folder: Path, pattern: str, files: Mapping[str, Any] | None) -> list[Path]:
    """The parts of a run's table as a checkpoint knows them: altered ones are set aside, missing ones are named.

    Args:
        folder: the run's.
        pattern: which files are parts, from there.
        files: the checkpoint's sizes and digests; None where it has none, and then all parts are as they should be.
    """
    found = sorted(folder.glob(pattern))
    if files is None:
        return found
    expected = {name: tuple(entry) for name, entry in files.items() if Path(name).match(pattern)}
    for name in expected:
        if not (folder / name).exists():
            logger.warning("%s is missing: what it held is left out", folder / name)
    for part in found:
        name = part.relative_to(folder).as_posix()
        if name in expected and (not part.is_file() or entry_of(part) != expected[name]):
            set_aside(part)
    return [part for part in found if part.exists()]


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

    def __init__(self, folder: Path, resumed_step: int | None, files: Mapping[str, Any] | None = None):
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        self.folder = folder / "layers"
        self.folder.mkdir(exist_ok=True)
        self.rows: list[tuple[Any, ...]] = []
        parts = checked_parts(folder, "layers/part-*.parquet", files)
        self.next = 1 + max((int(part.stem.split("-")[1]) for part in parts if part.stem[5:].isdecimal()), default=-1)
        for part in parts if resumed_step is not None else ():
            try:
                with part.open("rb") as file:  # a path with a colon would be taken for an address
                    table = pq.read_table(file)
                kept = table.filter(ds.field("step") <= resumed_step)
            except (OSError, ValueError):  # ArrowInvalid is a ValueError
                set_aside(part)
                continue
            if kept.num_rows == 0:
                digests.remove(part)
            elif files is not None and part.relative_to(folder).as_posix() not in files:
                # All that the run had measured by then is in the parts that the checkpoint knows: this one repeats it
                # (a divergence records its last rows again), or is somebody else's.
                if digests.differs(part):
                    set_aside(part)
                else:
                    digests.remove(part)
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
        digests.replace(temporary, path)  # brought to the disk: a checkpoint that follows rests on it
