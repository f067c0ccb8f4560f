"""The records of studies that were run: small files under version control, from which trials need not run again.

A study's records at one scale are a folder ``STUDY-SCALE``: results.csv (a row per trial, with its key), tables/ (a
Parquet file per measure, with the key of each row's trial), claims.json (the verdicts), and study.yaml.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.files import write_text, writing
from lamina.jobs.names import RESULTS
from lamina.jobs.status import ENDED
from lamina.papers.trials.measures import file_name, read_table
from lamina.papers.trials.trial import Trial, may_be

if TYPE_CHECKING:
    import pandas as pd

TABLES = "tables"


class Records:
    """The records in a folder, read when they are needed.

    Args:
        folder: of the records; it need not exist.
        own: the name of a study's own record. Where it and another have the same trial, it counts: a trial that was
            trained again on another kind of machine has a slightly different loss.
    """

    def __init__(self, folder: Path, own: str = ""):
        self.folder, self.own = folder, own
        self._tables: dict[str, dict[str, pd.DataFrame]] = {}

    @cached_property
    def rows(self) -> dict[str, Json]:
        """The result of every recorded trial that ended, by its key. Raises UserError for a file that can't be read."""
        import pandas as pd

        tables, places = [], set()
        for path in self._files(RESULTS):
            try:
                table = pd.read_csv(path.absolute(), dtype={"key": str})
                tables.append(table[table["status"].isin(ENDED)])  # what failed may be tried again
                places |= _places(table)
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"{str(path)!r}: no record of a study ({type(error).__name__}: {error})") from None
        rows: dict[str, Json] = {}
        for table in tables:
            kept = table.drop(columns=[name for name in table if name in places]).astype(object)
            for row in kept.where(kept.notna(), None).to_dict("records"):
                key = str(row["key"])
                rows[key] = _filled({str(name): value for name, value in row.items()}, rows.get(key, {}))
        return rows

    def row(self, trial: Trial) -> Json | None:
        """The recorded result of a trial; None if there is none. Raises UserError for one that is another trial's."""
        row = self.rows.get(trial.key)
        own = {"seed": trial.seed, "learning_rate": trial.learning_rate, "placement": trial.placement}
        for name, value in own.items():
            stored = None if row is None else row.get(name)
            if None in (stored, value) or stored == value or (name == "placement" and may_be(trial.first, str(stored))):
                continue
            raise UserError(
                f"records: {str(self.folder)!r}: the row of the trial {trial.key} has {name} {stored!r}, but the trial "
                f"has {value!r} (allowed: {RESULTS} as it was recorded)"
            )
        return row

    def table(self, key: str, measure: str) -> pd.DataFrame | None:
        """A measure's table of one trial; None if there is no record of it."""
        if measure not in self._tables:
            self._tables[measure] = self._read(measure)
        return self._tables[measure].get(key)

    def _files(self, name: str) -> list[Path]:
        """The records' files of a name, the study's own last: what is read later counts."""
        own = self.folder / self.own / name
        return sorted(self.folder.glob(f"*/{name}"), key=lambda path: (path == own, path))

    def _read(self, measure: str) -> dict[str, pd.DataFrame]:
        found: dict[str, pd.DataFrame] = {}
        for path in self._files(f"{TABLES}/{file_name(measure)}"):
            for key, rows in read_table(path).groupby("key", sort=False):
                found[str(key)] = rows.drop(columns="key").reset_index(drop=True)
        return found


def _places(table: pd.DataFrame) -> set[str]:
    """The columns of a study's axes: a trial's place in that study, which is none of its results."""
    ahead = [str(name) for name in table.columns[: list(table.columns).index("tuned")]]
    return set(ahead) - {"key", *columns.names()}


def _filled(row: Json, other: Json) -> Json:
    """A trial's row, with what only another study's record of it has: an older record lacks later columns."""
    if row.get("eval_loss") != other.get("eval_loss"):
        return row  # trained again, on another kind of machine
    return {**other, **{name: value for name, value in row.items() if value is not None or name not in other}}


def recorded_keys(record: Path) -> list[str]:
    """The keys of the trials in one study's record; none without one."""
    import pandas as pd

    path = record / RESULTS
    return pd.read_csv(path.absolute(), dtype={"key": str})["key"].tolist() if path.is_file() else []


def write_results(folder: Path, results: pd.DataFrame) -> None:
    """Write a study's rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULTS, results.to_csv(index=False))


def write_table(folder: Path, measure: str, rows: pd.DataFrame) -> None:
    """Write a measure's rows of all trials, each with its trial's key."""
    (folder / TABLES).mkdir(parents=True, exist_ok=True)
    with writing(folder / TABLES / file_name(measure)) as temporary:
        rows.to_parquet(temporary.absolute(), index=False, compression="zstd")
