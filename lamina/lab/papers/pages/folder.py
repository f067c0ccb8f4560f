"""Read a study's output folder, or the folder of a study's recorded results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.files import read_claims
from lamina.jobs.names import CLAIMS, RESULTS
from lamina.lab.papers.judging.checks import TRAINED
from lamina.lab.papers.judging.trials import NO_ARM
from lamina.lab.papers.study_catalog import STAGE
from lamina.lab.papers.trials.jobs import SCORE
from lamina.lab.papers.trials.store import TABLES
from lamina.reports.records import Frame, complete, groups, read_table, rows_of, study_header

OURS = "ours"  # the source of a study that follows no paper
_COUNTED = {"num_layers": "layers", "steps": "steps"}
_MEASURED = "measured_"  # prefix of a measurement's column with the name of a compared setting
_OF_A_STAGE = (SCORE, "eval_reward", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class StudyFolder:
    """The folder of a study at one scale."""

    folder: Path
    header: Json  # the content of study.yaml
    results: Frame  # one row per run
    claims: list[Json]  # the verdicts

    @property
    def definition(self) -> Json:
        return _mapping(self.header.get("definition"))

    @property
    def name(self) -> str:
        return str(self.definition.get("study") or self.folder.name)

    @property
    def scale(self) -> str:
        return str(_mapping(self.header.get("settings")).get("scale") or "cpu")

    @property
    def definition_of_scale(self) -> Json:
        return _mapping(_mapping(self.definition.get("scales")).get(self.scale))

    @property
    def axes(self) -> tuple[str, ...]:
        """The compared settings, with learning rate and seed."""
        axes = [*_mapping(self.definition_of_scale.get("axes")), STAGE]
        return tuple(axis for axis in axes if axis in self.results)

    @property
    def arm_axes(self) -> tuple[str, ...]:
        """The compared settings without learning rate and seed, or the placement if there are none."""
        return tuple(axis for axis in self.axes if axis not in NO_ARM) or ("placement",)

    @cached_property
    def varied(self) -> tuple[str, ...]:
        return tuple(a for a in self.arm_axes if self.results[a].nunique() > 1) or self.arm_axes[:1]

    @cached_property
    def value(self) -> str:
        """The column that the figures show: the held-out loss, or another job's main result."""
        for name in ("max_learning_rate", "eval_loss"):
            if name in self.results and self.results[name].notna().any():
                return name
        taken = {*columns.names(), *self.axes, "key", "tuned"}
        numeric = self.results.select_dtypes("number")
        return next((str(name) for name in numeric if name not in taken and numeric[name].notna().any()), "eval_loss")

    @property
    def first_stage(self) -> Frame:
        """The runs of the study's first job."""
        if STAGE not in self.results:
            return self.results
        later = set(_mapping(self.definition_of_scale.get("then")))
        return self.results[~self.results[STAGE].isin(later)]

    @property
    def tuned(self) -> Frame:
        """The runs at the chosen learning rates, or all runs if the study chose none."""
        return self.results[self.results["tuned"]] if self.results["tuned"].any() else self.results

    @property
    def measures(self) -> list[str]:
        """The names of the tables in the folder, such as "end-angular_distance"."""
        return sorted(path.stem for path in (self.folder / TABLES).glob("*.parquet"))

    def table(self, measure: str) -> Frame:
        """Return a measurement's rows for all runs, with the compared settings. An unreadable file gives no rows."""
        try:
            rows = read_table(self.folder / TABLES / f"{measure}.parquet")
        except (OSError, ValueError):
            return pd.DataFrame()
        axes = ("key", "placement", *self.arm_axes, "learning_rate", "seed", "status")
        present = [column for column in dict.fromkeys(axes) if column in self.results]
        rows = rows.rename(columns={name: f"{_MEASURED}{name}" for name in present if name in rows and name != "key"})
        return self.tuned[present].merge(rows, on="key", how="inner")

    @cached_property
    def has_sweep(self) -> bool:
        return bool((self.results.groupby(list(self.varied))["learning_rate"].nunique() > 1).any())

    @cached_property
    def measured_axes(self) -> tuple[str, ...]:
        """The settings that vary, with the learning rate if a configuration has several learning rates."""
        rates = self.tuned.groupby(list(self.varied))["learning_rate"].nunique()
        return (*self.varied, *(("learning_rate",) if (rates > 1).any() else ()))

    def label(self, row: Mapping[str, object], without: Collection[str] = ()) -> str:
        """Return a configuration's name: the values of the settings that vary, except the settings in ``without``."""
        words = []
        for axis in (axis for axis in self.measured_axes if axis not in without and axis in row):
            value = row[axis]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            counted = f"{value:g} {_COUNTED[axis]}" if number and axis in _COUNTED else ""
            words.append(counted or (f"{axis.replace('_', ' ')} {value:g}" if number else str(value)))
        return ", ".join(words)


def column_of(table: Frame, name: str) -> str:
    """Return a column's name in ``StudyFolder.table``, where some names have the prefix "measured_"."""
    return f"{_MEASURED}{name}" if f"{_MEASURED}{name}" in table else name


def has_claims(folder: Path) -> bool:
    return (folder / CLAIMS).is_file() or bool(study_header(folder).get("definition"))


def read_folder(folder: Path) -> StudyFolder:
    """Read a study's folder or record. Raises UserError if a file is damaged."""
    header, path = study_header(folder), folder / RESULTS
    try:
        raw: Frame = pd.read_csv(path.absolute(), dtype={"key": str}, keep_default_na=False, na_values=["", "nan"])
    except FileNotFoundError:
        raw = pd.DataFrame({"status": []})
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(path)!r}: Lamina cannot read this file as CSV ({error}). Restore the original file."
        ) from None
    tuned = raw["tuned"].astype(str).eq("True") if "tuned" in raw else pd.Series(False, index=raw.index)
    results = complete(raw).assign(tuned=tuned)
    return StudyFolder(folder=folder, header=header, results=results, claims=read_claims(folder) or [])


def over_seeds(rows: Frame, by: list[str], column: str) -> Frame:
    """Summarize a column over seeds, with one row for each combination of values in the columns ``by``.

    Each row has the mean, standard deviation, range and statuses ("3 finished, 2 diverged"). For a loss, only runs that
    trained count.
    """
    means = []
    for key, group in groups(rows, by):
        counted = group[group["status"].isin(TRAINED)] if column in ("eval_loss", "perplexity") else group
        values = counted[column].dropna()
        ended = ", ".join(f"{count} {status}" for status, count in group["status"].value_counts().items() if status)
        means.append(
            {
                **key,
                "mean": values.mean(),
                "std": values.std(ddof=1),
                "low": values.min(),
                "high": values.max(),
                "trained": len(values),
                "trials": len(group),
                "ended": ended,
            }
        )
    return pd.DataFrame(means)


def by_stage(rows: Frame) -> list[Frame]:
    """Split the rows by job, in the table's order."""
    return [rows] if STAGE not in rows else [part for _, part in rows.groupby(STAGE, sort=False)]


def value_of(rows: Frame, usual: str) -> str:
    """Return the column with the main result of a job after pretraining, or ``usual`` without such a column."""
    columns_here = (name for name in _OF_A_STAGE if name in rows and rows[name].notna().any())
    return usual if STAGE not in rows else next(columns_here, usual)


def measuring(rows: Frame, column: str) -> Frame:
    """Return the rows of the jobs that have a value in the column."""
    if STAGE not in rows or column not in rows:
        return rows
    return rows[rows.groupby(STAGE)[column].transform(lambda values: values.notna().any())]


def arms(study: StudyFolder) -> Frame:
    """Return one row per configuration and job, in the study's order, with the columns of ``over_seeds``.

    If the study chose no learning rate, the row shows the best learning rate. The best learning rate has the largest
    fraction of runs that trained. If several learning rates tie, the lowest mean decides.
    """
    rows = study.tuned
    if rows.empty:
        return pd.DataFrame()
    rows = rows.assign(label=[study.label(row, without=NO_ARM) for row in rows_of(rows)])
    by = list(dict.fromkeys(["label", "placement", *study.varied, "learning_rate"]))
    table = pd.concat([over_seeds(part, by, value_of(part, study.value)) for part in by_stage(rows)])
    table = table.reset_index(drop=True)
    share = table["trained"] / table["trials"]
    best = table.assign(share=share).sort_values(["share", "mean"], ascending=[False, True], kind="stable")
    kept = best.drop_duplicates([name for name in by if name != "learning_rate"]).index
    return table.loc[sorted(kept)].reset_index(drop=True)


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}
