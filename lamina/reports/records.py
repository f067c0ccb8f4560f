"""Read the files of a run or a study. A page omits missing or incomplete data without an error."""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard, cast

import numpy as np
import pandas as pd
import yaml

from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.core.values import real_path
from lamina.core.yaml_files import safe_load
from lamina.errors import UserError, one_line
from lamina.jobs.columns import NUMBERS, TEXTS
from lamina.jobs.files import DIGEST, SEAL, disk_full
from lamina.jobs.names import CONFIG, ENVIRONMENT, PLAN, RESULT, RESULTS
from lamina.jobs.run_folder import RunFolder
from lamina.placements import Plan
from lamina.reports.layer_rows import LayerRows
from lamina.studies.record import read_record, refuse_mixture

logger = logging.getLogger(__name__)

_METRICS = (
    *("step", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second"),
    *("eval_loss", "eval_corpus_loss"),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The records of one run. If a file is missing, the table from this file is empty."""

    name: str
    placement: str
    folder: Path
    status: str = ""
    seed: float = float("nan")
    failed: int | None = None  # the step to mark in the charts as the failure

    @cached_property
    def lines(self) -> list[Json]:
        """Return the records of metrics.jsonl, without damaged lines."""
        return RunFolder(self.folder).metrics

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Return each metric of ``lines`` as an array. A missing number becomes NaN."""
        return {name: _numbers([line.get(name, math.nan) for line in self.lines]) for name in _METRICS}

    def known(self, *columns: str) -> list[np.ndarray]:
        """Return these metrics from the lines that have numbers for all of these metrics."""
        found = [self.metrics[name] for name in columns]
        kept = ~np.any([np.isnan(values) for values in found], axis=0)
        return [values[kept] for values in found]

    @cached_property
    def task_scores(self) -> list[tuple[float, dict[str, float]]]:
        """For each evaluation on --eval-tasks, return the number of training tokens and the score of each task."""
        return [(line["tokens"], line["tasks"]) for line in self.lines if isinstance(line.get("tasks"), dict)]

    @cached_property
    def plan(self) -> Plan | None:
        """Return where each layer's norms sit, or None if plan.json is missing or unreadable."""
        try:
            return Plan.from_dict(json.loads((self.folder / PLAN).read_text(encoding="utf-8", errors="replace")))
        except (OSError, ValueError, TypeError):
            return None

    @cached_property
    def result(self) -> Json:
        return lenient_mapping(self.folder / RESULT)

    @cached_property
    def environment(self) -> Json:
        return lenient_mapping(self.folder / ENVIRONMENT)

    @cached_property
    def layers(self) -> LayerRows:
        return LayerRows(self.folder, self.failed)

    @cached_property
    def probes(self) -> dict[str, Frame]:
        """Return the results of each scheduled probe, by the name of the probe (probes/NAME/part-*.parquet)."""
        folders = sorted(self.folder.glob("probes/*/"))
        return {folder.name: _parts(sorted(folder.glob("part-*.parquet"))) for folder in folders}

    def blocks(self, metric: str) -> Frame:
        """Return a metric of whole blocks, with one row per layer (-1: the embedding) and one column per step."""
        return self.layers.table(metric, "all", whole_of(metric), embedding=True)


@dataclass(frozen=True, kw_only=True)
class Study:
    """The records of a study. A single run counts as a study of one trial."""

    folder: Path
    header: Json
    settings: Json
    results: Frame
    trials: tuple[Trial, ...]

    @property
    def environment(self) -> Json:
        """Return the content of environment.json for the first trial that has this file."""
        return next((t.environment for t in self.trials if t.environment), {})


def read_study(folder: Path) -> Study:
    """Read study.yaml and results.csv. Raises UserError for damaged files, or for a trial with other settings."""
    header = study_header(folder)
    if not (folder / RESULTS).is_file():
        raise UserError(
            f"{str(folder)!r}: this study has no results.csv yet, because no trial has ended. Wait for the first trial."
        )
    try:
        raw = pd.read_csv((folder / RESULTS).absolute(), dtype=str, keep_default_na=False)
    except (ValueError, OSError) as error:
        raise UserError(
            f"{str(folder / RESULTS)!r}: Lamina cannot read this file as CSV ({error}). Restore the original file."
        ) from None
    results = complete(raw)
    if results.empty:
        raise UserError(f"{str(folder / RESULTS)!r}: this file holds no trial. Restore the original file.")
    trials = tuple(
        Trial(
            name=row["trial"],
            placement=row["placement"],
            folder=_inside(folder / "trials", row["trial"]),
            status=row["status"],
            seed=row["seed"],
        )
        for row in rows_of(results)
    )
    settings: Json = header.pop("settings", {})  # study_header refuses any other type
    common = dict(settings)
    if isinstance(init := common.get("init"), str):
        common["init"] = init.removeprefix("same:")
    stored = {trial.name: lenient_mapping(trial.folder / CONFIG) for trial in trials}
    refuse_mixture({name: config for name, config in stored.items() if config}, common)
    return Study(folder=folder, header=header, settings=settings, results=results, trials=trials)


def faults(folder: Path) -> list[str]:
    """Return a message for each damaged file of a run, or of a study's trials."""
    lines = []
    for run in (folder, *sorted(folder.glob("trials/*/"))):
        name = f"{run.relative_to(folder).as_posix()}: " * (run != folder)
        lines += [f"{name}{fault}" for fault in RunFolder(run).faults()]
    return lines


def study_header(folder: Path) -> Json:
    """Return the content of study.yaml, or {} with a warning if the file is damaged."""
    try:
        return read_record(folder)
    except UserError as error:
        logger.warning("%s. The report omits the study's settings", error.problem)
        return {}


def read_run(folder: Path, failed: int | None = None) -> Study:
    """Read a single run's folder as a study of one trial. ``failed`` is the step at which the run went wrong."""
    trial = Trial(name=folder.name, placement="", folder=folder)
    config, result, plan = lenient_mapping(folder / CONFIG), trial.result, trial.plan
    placement = str(config.get("placement") or (plan.placement if plan else "") or folder.name)
    row = {key: value for key, value in {**config, **result}.items() if key in NUMBERS or key in TEXTS}
    row |= {"trial": folder.name, "placement": placement, "status": str(result.get("status") or "unfinished")}
    results = complete(pd.DataFrame([row]))
    if pd.isna(results.loc[0, "steps"]) and trial.lines:
        results.loc[0, "steps"] = trial.metrics["step"].max()
    trial = Trial(name=folder.name, placement=placement, folder=folder, status=str(row["status"]), failed=failed)
    header = {"command": trial.environment.get("command") or config.get("command")}
    return Study(folder=folder, header=header, settings=config, results=results, trials=(trial,))


def complete(results: Frame) -> Frame:
    """Return the results with every column that the pages read. A missing number becomes NaN, and a missing text ""."""
    results = results.reset_index(drop=True).copy()
    for name in TEXTS:
        texts = results[name] if name in results else pd.Series("", index=results.index)
        results[name] = texts.astype(object).where(texts.notna(), "").astype(str)
    for name in NUMBERS:
        numbers = results[name] if name in results else pd.Series(float("nan"), index=results.index)
        results[name] = cast("Frame", pd.to_numeric(numbers, errors="coerce")).astype(float)
    return results


def _numbers(values: list[object]) -> np.ndarray:
    array = np.array(values) if {type(value) for value in values} <= {int, float} else None
    if array is None or array.dtype == object:
        numbers = pd.Series(pd.to_numeric(pd.Series(values, dtype=object), errors="coerce"))
        return np.asarray(numbers, dtype=float)
    return array


def rows_of(frame: Frame) -> list[Json]:
    return cast("list[Json]", frame.to_dict("records"))


def flatten(mapping: Json, prefix: str = "") -> Json:
    flat: Json = {}
    for key, value in mapping.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def read_table(path: Path, columns: Sequence[str] = ()) -> Frame:
    """Read a .csv or .parquet file. Raises OSError, or ValueError for a damaged file or a missing column."""
    read = pd.read_csv if path.suffix == ".csv" else pd.read_parquet
    table: Frame = read(path.absolute())  # a relative path with a colon would look like a URI
    if missing := [name for name in columns if name not in table]:
        raise ValueError(f"{path.name} has no column {missing[0]}")
    return table


def whole_of(metric: str) -> tuple[str, ...]:
    """Return the values of the column ``sublayer`` that mark rows of whole blocks."""
    # the hidden state after a block's feed-forward is the block's output
    return ("feed_forward", "block") if metric.startswith("hidden_") else ("block",)


def select(rows: Frame, columns: Mapping[str, object]) -> Frame:
    """Return the rows in which each column of ``columns`` has the given value. None and NaN match missing values."""
    for column, value in columns.items():
        if column not in rows:
            return rows.iloc[:0]
        rows = rows[rows[column].isna() if value is None or value != value else rows[column] == value]
    return rows


def groups(rows: Frame, columns: Sequence[str], *, dropna: bool = False) -> Iterator[tuple[Json, Frame]]:
    """Group rows by columns. For each group, yield the values of these columns, and the rows."""
    for key, group in rows.groupby(list(columns), sort=False, dropna=dropna) if columns else [((), rows)]:
        yield dict(zip(columns, key if isinstance(key, tuple) else (key,), strict=True)), group


def _inside(parent: Path, name: str) -> Path:
    """Return a trial's folder. If the name leads out of the study, return a path that does not exist."""
    path = parent / name
    return path if name and real_path(path).is_relative_to(real_path(parent)) else parent / "no-such-trial"


def lenient_mapping(path: Path) -> Json:
    """Read a mapping from a JSON or YAML file, or return {} if the file is missing or unreadable."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        data = json.loads(text) if path.suffix == ".json" else safe_load(text)
    except OSError:
        return {}
    except (ValueError, yaml.YAMLError):
        logger.warning("%s is not readable, so the report leaves it out", path.name)
        return {}
    return {key: value for key, value in data.items() if key not in (DIGEST, SEAL)} if isinstance(data, dict) else {}


@contextmanager
def whole(folder: Path, what: str) -> Iterator[None]:
    """Turn the errors that damaged records cause into a UserError. ``what`` names the job."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        denied = getattr(error, "errno", None) in (errno.EROFS, errno.EACCES, errno.EPERM)
        if denied or disk_full(error) or isinstance(error, UserError):
            raise
        raise UserError(f"{str(folder)!r}: the records of the {what} are incomplete ({one_line(error)})") from None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _parts(paths: Iterable[Path]) -> Frame:
    """Join the files of a probe's results to one table. Skip unreadable files, and files without step or value."""
    parts = []
    for path in paths:
        try:
            part = read_table(path)
            part.loc[:, ["step", "value"]]
            parts.append(part)
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s is not readable, so the report leaves it out (%s)", path.name, error)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["step", "value"])
