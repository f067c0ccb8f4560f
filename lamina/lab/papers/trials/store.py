"""Read and write the folder of all studies' training runs, and read recorded results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lamina.core.json_types import Json
from lamina.core.values import refuse_special
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.files import noted, read_config, read_result, write_json, write_parquet, write_text
from lamina.jobs.folder import lock
from lamina.jobs.manifest import MODEL, what_is_broken
from lamina.jobs.names import CONFIG, ENVIRONMENT, MANIFEST, MEASURES, RESULTS, TRIAL
from lamina.jobs.seals import refuse_altered, refuse_tables
from lamina.jobs.status import ENDED, Status
from lamina.lab.papers.trials import measures
from lamina.lab.papers.trials.jobs import TRIAL_JOBS
from lamina.lab.papers.trials.measures import file_name, measure, read_table
from lamina.lab.papers.trials.trial import SPELLED, StudyTrial, key, may_be
from lamina.studies.task import Busy, Task
from lamina.training.settings import PretrainSettings

if TYPE_CHECKING:
    import pandas as pd

TABLES = "tables"


class Records:
    """The recorded results of earlier studies.

    Args:
        folder: the folder with a subfolder for each study. The folder may be missing.
        own: the name of this study's subfolder. If several subfolders have the same run, Lamina uses this subfolder's
            result, because losses differ slightly between machines.
    """

    def __init__(self, folder: Path, own: str = ""):
        self.folder, self.own = folder, own
        self._tables: dict[str, dict[str, pd.DataFrame]] = {}

    @cached_property
    def rows(self) -> dict[str, Json]:
        """The recorded results of all finished runs, by key. Raises UserError for an unreadable file."""
        import pandas as pd

        tables, places, shared = [], set(), {"key", *columns.names()}
        for path in self._files(RESULTS):
            try:
                table = pd.read_csv(path.absolute(), dtype={"key": str})
                tables.append(table[table["status"].isin(ENDED)])  # a later run may replace a failed run
                places |= {*map(str, table.columns[: list(table.columns).index("tuned")])}  # the compared settings
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"{str(path)!r}: not a study's record ({type(error).__name__}: {error})") from None
        rows: dict[str, Json] = {}
        for table in tables:
            kept = table.drop(columns=[name for name in table if name in places - shared]).astype(object)
            for row in kept.where(kept.notna(), None).to_dict("records"):
                row, other = {str(name): value for name, value in row.items()}, rows.get(str(row["key"]), {})
                if row.get("eval_loss") == other.get(
                    "eval_loss"
                ):  # otherwise, another kind of machine trained the run again
                    row = {**other, **{n: value for n, value in row.items() if value is not None or n not in other}}
                rows[str(row["key"])] = row
        return rows

    def row(self, trial: StudyTrial) -> Json | None:
        """Return a run's recorded result, or None. Raises UserError if the recorded settings contradict the run."""
        row = self.rows.get(trial.key)
        facts = {"seed": trial.seed, "learning_rate": trial.learning_rate, "placement": trial.placement}
        for name, value in facts.items():
            stored = None if row is None else row.get(name)
            if None in (stored, value) or stored == value or (name == "placement" and may_be(trial.first, str(stored))):
                continue
            raise UserError(
                f"records: {str(self.folder)!r}: the row of the trial {trial.key} has {name} {stored!r}, but the "
                f"trial has {value!r}. Restore the original {RESULTS}."
            )
        return row

    def table(self, key: str, measure: str) -> pd.DataFrame | None:
        """Return the recorded table of a run's measurement, or None."""
        if measure not in self._tables:
            tables: dict[str, pd.DataFrame] = {}
            for path in self._files(f"{TABLES}/{file_name(measure)}"):
                for name, rows in read_table(path).groupby("key", sort=False):
                    tables[str(name)] = rows.drop(columns="key").reset_index(drop=True)
            self._tables[measure] = tables
        return self._tables[measure].get(key)

    def _files(self, name: str) -> list[Path]:
        study_file = self.folder / self.own / name
        paths = sorted(self.folder.glob(f"*/{name}"), key=lambda path: (path == study_file, path))
        for path in paths:
            refuse_tables(self.folder / path.relative_to(self.folder).parts[0])
        return paths


def recorded_keys(record: Path) -> list[str]:
    """Return the keys of the runs in a study's folder or record."""
    import pandas as pd

    path = record / RESULTS
    refuse_tables(record)
    return pd.read_csv(path.absolute(), dtype={"key": str})["key"].tolist() if path.is_file() else []


def write_results(folder: Path, results: pd.DataFrame) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULTS, results.to_csv(index=False))


def write_table(folder: Path, measure: str, rows: pd.DataFrame) -> None:
    (folder / TABLES).mkdir(parents=True, exist_ok=True)
    write_parquet(folder / TABLES / file_name(measure), rows, compression="zstd")


_CLAIMS = ".claims"


@dataclass(frozen=True, kw_only=True)
class StoredTask(Task):
    """A run in the folder that several processes and studies share."""

    measures: tuple[str, ...] = ()
    identity: Json

    def to_request(self) -> Json:
        return {**super().to_request(), "measures": list(self.measures), "identity": self.identity}

    @classmethod
    def from_request(cls, request: Json) -> StoredTask:
        task = Task.from_request(request)
        stored = {"measures": tuple(request["measures"]), "identity": request["identity"]}
        return cls(settings=task.settings, job=task.job, trains=task.trains, **stored)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Lock the run during its execution. Raises Busy if another process executes the run."""
        with ExitStack() as held:
            try:
                held.enter_context(lock(self.folder.parent / _CLAIMS / self.folder.name))
            except UserError as error:
                raise Busy(str(error)) from None
            yield

    def run(self) -> Json:
        """Execute or resume the run, make missing measurements, and return the result."""
        refuse_another(self.folder)
        # The folder's settings replace ours. Both mean the same, because the folder's name is a hash of their meaning,
        # but they may be written differently, such as another path of the same text.
        path = self.folder / CONFIG
        stored, ours = read_config(self.folder) if path.is_file() else {}, self.settings.to_dict()
        settings = replace(self.settings, **{name: stored[name] for name in SPELLED if name in stored and name in ours})
        write_json(self.folder / TRIAL, self.identity)
        result = self.job(settings, resume="auto", bar=False)
        if self.measures and result["status"] in ENDED:
            measure(self.folder, cast(PretrainSettings, settings), self.measures)
        return result


def refuse_another(folder: Path) -> None:
    """Raise UserError if a folder's name is not the key of the run in the folder."""
    path = folder / TRIAL
    status = (read_result(folder) or {}).get("status")
    if not path.is_file() and status not in ENDED and (status is None or not (folder / CONFIG).is_file()):
        return  # the run has not begun
    try:
        held = key(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"store: {str(path)!r} is not readable ({error}), so Lamina cannot tell which trial the folder holds. "
            "Restore the original file, or delete the folder to run the trial again."
        ) from None
    if held != folder.name:
        raise UserError(
            f"store: the folder {str(folder)!r} holds the trial {held}, according to its {TRIAL}. Rename the folder "
            "to the trial's name, or delete the folder to run the trial again."
        )


UNTRAINED = (Status.DIVERGED.value, Status.STUCK.value)
"""The statuses of runs whose models other runs cannot use."""


class Store:
    """The folder of all studies' runs.

    Args:
        folder: the folder, with a subfolder for each run.
        records: recorded results of earlier studies, which may come from another machine.
        threads: the number of threads per run (default: from the run's settings).
        run_code: whether runs may execute the code in task files.
    """

    def __init__(self, folder: Path, records: Records, threads: int | None = None, *, run_code: bool = False):
        self.folder, self.records, self.threads, self.run_code = folder, records, threads, run_code
        self._ended: dict[str, Json] = {}
        self._complete: set[tuple[str, tuple[str, ...]]] = set()
        self._verified: set[str] = set()

    def place(self, key: str) -> Path:
        """Return a run's folder. Raises UserError if the folder holds another run or is damaged."""
        folder = self.folder / key
        if key not in self._verified and folder.is_dir():
            refuse_special("store", folder)
            refuse_another(folder)
            refuse_altered(folder)
            refuse_altered(folder, MEASURES, missing=False)
            self._verified.add(key)
        return folder

    def machines(self, keys: Iterable[str]) -> list[Json]:
        """Count runs by machine, torch version and git revision. The largest count is first."""
        counts = Counter[str]()
        for name in keys:
            if machine := (noted_there := noted(self.folder / name / ENVIRONMENT)).get("machine"):
                versions = {
                    "torch": noted_there.get("versions", {}).get("torch"),
                    "revision": noted_there.get("git_revision"),
                }
                counts[json.dumps({**machine, **versions}, sort_keys=True)] += 1
        return [{"trials": count, **json.loads(text)} for text, count in counts.most_common()]

    def task(self, trial: StudyTrial) -> StoredTask:
        places = {name: str((self.folder / source.key).absolute()) for name, source in trial.inputs.items()}
        changes: Json = {"output": str(self.folder / trial.key), **places}
        if self.threads is not None:
            changes["threads"] = self.threads
        if self.run_code and any(getattr(trial.settings, name, None) for name in ("tasks", "eval_tasks")):
            changes["run_code"] = True
        settings = replace(trial.settings, **changes)
        job = TRIAL_JOBS[trial.job]
        return StoredTask(
            settings=settings, job=job.run, trains=job.trains, measures=trial.measures, identity=trial.identity
        )

    def result(self, trial: StudyTrial) -> Json | None:
        """Return a run's result, or None if the run is unfinished."""
        if trial.key in self._ended:
            return self._ended[trial.key]
        result = self.outcome(trial)
        if (
            result is None or result["status"] not in ENDED
        ):  # not cached: the trial may still run here, to train its model
            return self.records.row(trial) or self._inherited(trial)
        self._ended[trial.key] = result
        return result

    def outcome(self, trial: StudyTrial) -> Json | None:
        """Return the result in a run's folder, even if the run failed. Returns None without a result."""
        folder = self.place(trial.key)
        return read_result(folder) if folder.is_dir() else None

    def has_model(self, trial: StudyTrial) -> bool:
        """Return whether other runs can start from a run's model. Raises UserError if the model is incomplete."""
        model = self.place(trial.key) / MODEL
        if (model / MANIFEST).is_file() and (broken := what_is_broken(model, content=False)) is not None:
            raise UserError(
                f"store: {str(model)!r}: {broken}, and other trials start from this model. "
                "Restore the original files, or delete the trial's folder to train the model again."
            )
        return model.is_dir()

    def damage(self, trials: Iterable[StudyTrial]) -> list[str]:
        """Return a text line for each damaged model or checkpoint of finished runs."""
        lines = []
        for name in dict.fromkeys(trial.key for trial in trials if self.result(trial) and trial.key in self._ended):
            folder = self.folder / name
            for sealed in (folder / MODEL, *sorted(folder.glob("checkpoints/checkpoint-*"))):
                if (sealed / MANIFEST).is_file() and (broken := what_is_broken(sealed, content=False)) is not None:
                    lines.append(f"{sealed.relative_to(self.folder)}: {broken}")
        return lines

    def _inherited(self, trial: StudyTrial) -> Json | None:
        """Return a result with the status of an input model that diverged or got stuck, otherwise None."""
        for source in trial.inputs.values():
            result = self.result(source)
            if result is not None and result["status"] in UNTRAINED:
                return {
                    "status": str(result["status"]),
                    "reason": (f"the trial starts from a model whose status is {result['status']}"),
                }
        return None

    def complete(self, trial: StudyTrial) -> Json | None:
        """Return a run's result, or None if the run is unfinished or a measurement is missing."""
        result, trial_id = self.result(trial), (trial.key, trial.measures)
        if result is None or not trial.measures or trial_id in self._complete or self._inherited(trial) is not None:
            return result
        lacking = measures.missing(self.place(trial.key), trial.measures)
        model = result["status"] != "diverged" or "key" not in result  # a recorded, diverged run has no model
        if model and any(self.records.table(trial.key, measure) is None for measure in lacking):
            return None
        self._complete.add(trial_id)
        return result

    def table(self, key: str, measure: str) -> pd.DataFrame | None:
        table = measures.table(self.place(key), measure)
        return table if table is not None else self.records.table(key, measure)
