"""Write and read a run's records: measurements by layer, metrics.jsonl and watched.json."""

from __future__ import annotations

import json
import logging
import math
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from lamina.core.extras import missing_extra
from lamina.core.json_types import Json, RunState
from lamina.core.values import path
from lamina.errors import UserError, one_line
from lamina.jobs.columns import SCORES, SPIKES
from lamina.jobs.files import finite, read_json, write_lines, writing
from lamina.jobs.manifest import sync
from lamina.jobs.names import METRICS
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.settings import above, at_least, setting
from lamina.probes.engine.spikes import FEWEST, spikes, surges
from lamina.training.setting_groups import GuardSettings, trackers

logger = logging.getLogger(__name__)

Location: TypeAlias = tuple[int, str, str]
"""A part of the model: layer (-1 outside the layers), sub-layer, role.

In a sub-layer, the role of the weights is "all". A layer's weights outside its sub-layers have the role "other".
"""
MODEL: Location = (-1, "model", "all")
"""The whole model."""


class Row(NamedTuple):
    """A measurement."""

    step: int
    layer: int  # the layer's number from 0, or -1 outside the layers
    sublayer: str
    role: str
    number: int  # the index among the values with the same metric and location, such as an expert's number
    metric: str
    value: float

    @property
    def location(self) -> Location:
        return self[1:4]


def by_step(rows: Iterable[Row], metric: str) -> dict[int, float]:
    """Return a metric's values by step. If a step has several values, return the last."""
    return {row.step: row.value for row in rows if row.metric == metric}


LOSS, NORM, RATE = "step_loss", "step_gradient_norm", "learning_rate"
"""The metrics of a whole step: the loss, the norm of the model's gradient, and the learning rate."""
BETWEEN = "step_"
"""The prefix of gains and row norms at steps between two records. Only the alarm rules use these measurements."""


@dataclass(frozen=True, kw_only=True)
class LastEvaluation:
    """The results of the last evaluation."""

    step: int = -1  # the last trained step before the evaluation, or -1 without an evaluation
    loss: float = math.inf  # the loss on the held-out blocks, in nats per token
    second: float | None = None  # the loss on the held-out blocks of a second corpus, or None
    scores: Mapping[str, float] = field(default_factory=dict)  # the objective's other metrics, such as accuracy
    tasks: Mapping[str, float] | None = None  # the scores on eval_tasks

    def apart(self) -> Json:
        """Return the results on the second corpus and on tasks, by the names that records use."""
        second = {} if self.second is None else {"eval_corpus_loss": self.second}
        return second if self.tasks is None else {**second, "tasks": dict(self.tasks)}


def spike_columns(folder: Path) -> Json:
    """Count spikes and surges in a run's losses and gradient norms. In a short run, spikes are None."""
    rows, values_by_column = read_rows(folder, [LOSS, NORM]), dict[str, Any].fromkeys(SPIKES)
    for metric, column in ((LOSS, "loss"), (NORM, "gradient")):
        values = [value for _, value in sorted(by_step(rows, metric).items())]
        if values:
            values_by_column[f"{column}_surges"] = int(surges(values).sum())
        if len(values) > FEWEST:
            marked = spikes(values)
            values_by_column[f"{column}_spikes"] = int(marked.sum())
            values_by_column[f"{column}_spike_score"] = float(marked.mean())
    return values_by_column


_TYPES = {
    "step": "int64", "layer": "int32", "sublayer": "string", "role": "string", "index": "int32", "metric": "string",
    "value": "float64",
}  # fmt: skip
LAYER_COLUMNS = tuple(_TYPES)


def layer_parts(folder: Path) -> list[Path]:
    """Return the files with a run's measurements by layer, in order: Parquet files, or .npz files without pyarrow."""
    return sorted(part for part in (folder / "layers").glob("part-*") if part.suffix in (".parquet", ".npz"))


def read_part(part: Path, metrics: Sequence[str] | None = None, sublayer: str | None = None) -> dict[str, list[Any]]:
    """Read a file's columns, for the given metrics and sub-layer. Raises OSError, ValueError or KeyError."""
    if part.suffix == ".npz":
        import numpy as np

        try:
            with np.load(part, allow_pickle=False) as file:
                columns = {name: file[name] for name in LAYER_COLUMNS}
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from error
        chosen = np.ones(len(columns["metric"]), bool) if metrics is None else np.isin(columns["metric"], list(metrics))
        chosen &= True if sublayer is None else columns["sublayer"] == sublayer
        return {name: values[chosen].tolist() for name, values in columns.items()}
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = [("metric", "in", list(metrics))] if metrics is not None else []
    wanted += [("sublayer", "==", sublayer)] if sublayer is not None else []
    try:
        table = pq.read_table(part.absolute(), columns=list(LAYER_COLUMNS), filters=wanted or None)
        table = table.cast(pa.schema([pa.field(name, pa.type_for_alias(kind)) for name, kind in _TYPES.items()]))
    except NotImplementedError as error:  # pyarrow's, for a list or a date in place of a number
        raise ValueError(str(error)) from error
    if missing := [name for name in LAYER_COLUMNS[:-1] if table.column(name).null_count]:
        raise ValueError(f"a row has no {missing[0]}")
    return table.to_pydict()


def read_rows(folder: Path, metrics: Sequence[str] | None = None, sublayer: str | None = None) -> list[Row]:
    """Read a run's measurements by layer, for the given metrics and sub-layer (default: all).

    Lamina skips unreadable files with a warning. Raises UserError for a Parquet file if pyarrow is not installed.
    """
    rows: list[Row] = []
    for part in layer_parts(folder):
        try:
            columns = read_part(part, metrics, sublayer)
        except (OSError, ValueError, KeyError) as error:  # ArrowInvalid is a ValueError
            logger.warning("%s is not readable, so Lamina skips this file (%s)", part, error)
        except ModuleNotFoundError as error:
            raise missing_extra(str(part), error) or error from None
        else:
            columns["value"] = [math.nan if value is None else value for value in columns["value"]]
            rows += map(Row, *columns.values())
    return rows


class MetricsWriter:
    """Write metrics.jsonl, one line for each record, without delay.

    Args:
        rollbacks: the records of the rollbacks so far.
    """

    def __init__(self, folder: Path, rollbacks: Iterable[Mapping[str, Any]] = ()):
        self.path, self.rollbacks = folder / METRICS, tuple(rollbacks)
        self.best_eval = math.inf
        self.evaluation = LastEvaluation()  # the last one of an earlier process
        self.tokens_before = 0  # in the records of an earlier process
        self._unsynced = 0

    def load_state_dict(self, state: RunState) -> None:
        """Drop the records that are later than the checkpoint."""
        logged_step = int(state.get("logged_step", 0))
        if "step" not in state or not (self.path.exists() or logged_step):
            return
        records = [r for r in RunFolder(self.path.parent).metrics if r["step"] <= state["step"] and "rollback" not in r]
        records += [finite(dict(rollback)) for rollback in self.rollbacks]  # the records of rollbacks always stay
        records.sort(key=lambda record: record["step"])
        last = max((record["step"] for record in records if "loss" in record), default=0)
        if last < logged_step:
            logger.warning("%s: the records of steps %d to %d are missing", self.path, last + 1, logged_step)
        write_lines(self.path, records)
        self.tokens_before = max((record["tokens"] for record in records if record.get("tokens")), default=0)
        self.evaluation, self.best_eval = _evaluations(records)

    def write(self, record: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(f"{json.dumps(finite(dict(record)))}\n".encode())
        self._unsynced += 1
        if self._unsynced == 1000:
            self.sync()

    def sync(self) -> None:
        if self.path.exists():
            sync(self.path)
        self._unsynced = 0


def _evaluations(records: list[Json]) -> tuple[LastEvaluation, float]:
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
    """Copy the records that are later than ``step`` to metrics-rollback-NUMBER.jsonl. Call this before a rollback."""
    gone = [record for record in RunFolder(folder).metrics if record["step"] > step]
    write_lines(folder / f"metrics-rollback-{number}.jsonl", gone)


def _number(part: Path) -> int:
    number = part.stem.removeprefix("part-")
    return int(number) if number.isdecimal() else -1


class LayersWriter:
    """Write measurements by layer into several files. A killed run loses only the last file.

    A file covers 10 seconds or 0.2 % of the run's time so far, whichever is longer. Each file is a Parquet table.
    Without pyarrow, each file is a .npz file with an array per column.
    """

    rows_per_part = 20_000
    seconds_per_part, share_per_part = 10.0, 0.002

    def __init__(self, folder: Path):
        self.folder = folder / "layers"
        self.folder.mkdir(exist_ok=True)
        self.rows: list[Row] = []
        self.next = self._after_last()
        self._begun = self._flushed = time.monotonic()

    def last_step(self) -> int:
        """Return the step of the last measurement on disk, or 0."""
        steps = (max(read_part(part)["step"], default=0) for part in reversed(layer_parts(self.folder.parent)))
        return next(steps, 0)

    def _after_last(self) -> int:
        return 1 + max(map(_number, layer_parts(self.folder.parent)), default=-1)

    def load_state_dict(self, state: RunState) -> None:
        """Drop the measurements that are later than the checkpoint."""
        if "step" not in state:
            return
        for part in layer_parts(self.folder.parent):
            if "layer_parts" not in state:
                rows = list(map(Row, *read_part(part).values()))
                kept = [row for row in rows if row.step <= state["step"]]
                if len(kept) < len(rows):
                    part.unlink()
                    self._write(_number(part), kept)
            elif _number(part) >= state["layer_parts"]:
                part.unlink()
        if (missing := state.get("layer_parts", 0) - len(layer_parts(self.folder.parent))) > 0:
            logger.warning("%s: %d files are missing, so Lamina skips their records", self.folder, missing)
        self.next = state.get("layer_parts", self._after_last())

    def add(self, rows: Iterable[Row]) -> None:
        self.rows += rows
        now = time.monotonic()
        pause = max(self.seconds_per_part, self.share_per_part * (now - self._begun))
        if len(self.rows) >= self.rows_per_part or now - self._flushed > pause:
            self.flush()

    def flush(self) -> None:
        self._write(self.next, self.rows)
        self.rows, self.next = [], self.next + bool(self.rows)
        self._flushed = time.monotonic()

    def _write(self, number: int, rows: Sequence[Row]) -> None:
        if not rows:
            return
        columns = dict(zip(LAYER_COLUMNS, zip(*rows, strict=True), strict=True))
        path = self.folder / f"part-{number:05d}"
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            import numpy as np

            kinds = {name: str if kind == "string" else kind for name, kind in _TYPES.items()}
            arrays = {name: np.array(column, kinds[name]) for name, column in columns.items()}
            with writing(path.with_suffix(".npz")) as temporary, temporary.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            return
        arrays = [pa.array(column, kind) for column, kind in zip(columns.values(), _TYPES.values(), strict=True)]
        with writing(path.with_suffix(".parquet")) as temporary, temporary.open("wb") as file:
            pq.write_table(pa.table(arrays, names=list(LAYER_COLUMNS)), file)


OnDivergence = Literal["note", "stop"]


class WatchSettings(GuardSettings):
    """The settings of ``lamina.watch`` and ``lamina.LayerMonitor``."""

    without = frozenset({"stuck_margin"})
    order = ("output", "every", "layers", "first_layer", "attention", "batches", "on_divergence")

    output: str = setting("runs/watched", "folder for the records and the report page", path)
    every: int = setting(
        20, "steps between two records (Lamina keeps the loss and gradient norm of every step)", at_least(1)
    )
    layers: str | None = setting(
        None, "module path of the list of layers (such as model.layers), if Lamina cannot find it"
    )
    first_layer: int | None = setting(
        None,
        "for a pipeline stage, the index of the stage's first layer in the whole model (if no module name "
        "shows this index)",
        at_least(0),
    )
    attention: bool = setting(True, "whether to record the largest attention logit and the load of each expert")
    batches: bool = setting(
        False,
        "whether to record the first tokens of each row, for batches with an alarm or an unusual loss or gradient",
    )
    on_divergence: OnDivergence = setting("note", "whether to write a note or stop the training at a divergence")
    skip_outliers: float | None = setting(
        None,
        "skip a step if its loss or gradient norm is this many standard deviations above the mean of the last "
        "128 steps (OLMo-core: 6)",
        above(0.0),
    )
    report_to: str = setting(
        "none",
        "trackers that receive the metrics: none, or a comma-separated list of tensorboard, wandb, trackio",
        trackers,
    )


VERSION = 1
WATCHED = "watched.json"


def read_about(folder: Path) -> Json:
    """Read watched.json, or return {} if it is missing. Raises UserError for damaged or other versions' records."""
    if not (folder / WATCHED).exists():
        return {}
    try:
        about = read_json(folder / WATCHED)
        version = about.get("record")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"record: {str(folder / WATCHED)!r} cannot be read ({one_line(error)}). Restore the file, or choose "
            "another folder."
        ) from None
    if version != VERSION:
        raise UserError(
            f"record: {str(folder)!r} holds records of version {version!r}, but this version of Lamina reads "
            f"only version {VERSION}. Use the version that wrote the records, or another folder."
        )
    for name in ("settings", "history"):
        if not isinstance(entry := about.get(name) or {}, dict):
            raise UserError(
                f"{name}: {str(entry)[:60]} in {str(folder / WATCHED)!r} is not a mapping. Restore the original file."
            )
    for name, kind in (("layers", dict), ("notes", str), ("optimizers", str)):
        entries, file = about.get(name, []), str(folder / WATCHED)
        if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
            raise UserError(
                f"{name}: {str(entries)[:60]} in {file!r} is not a list of {kind.__name__}. Restore the original file."
            )
    return about
