"""A scale with a search: its candidates, and the rows of their trials."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.jobs.files import write_text
from lamina.jobs.status import ENDED, Status
from lamina.studies.engine.results import as_table, result_row
from lamina.studies.running import Executor, run_tasks
from lamina.studies.search.searching import Searching
from lamina.studies.trials.store import Store
from lamina.studies.trials.task import Task
from lamina.studies.trials.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

    from lamina.studies.catalog.study import Scale

CANDIDATES = "search.csv"


def run_search(
    scale: Scale,
    changes: Json,
    store: Store,
    folder: Path,
    *,
    workers: int | None,
    execute: Executor,
    write: Callable[[pd.DataFrame], None],
    bar: bool,
) -> pd.DataFrame:
    """Search a scale; returns a row per trial that has ended or failed. search.csv has a row per candidate.

    Raises:
        UserError: without Optuna, and for settings that a candidate can't have.
        OSError: the disk is full.
        KeyboardInterrupt: after the running trials have saved a checkpoint.
    """

    def run(tasks: Mapping[str, Task]) -> None:
        run_tasks(tasks, done=0, workers=workers, bar=bar, ended=lambda name, result: None, execute=execute)
        write(table())

    def table() -> pd.DataFrame:
        write_text(folder / CANDIDATES, searching.table().to_csv(index=False))
        known = [(trial, result) for trial in searching.trials() if (result := _result(store, trial)) is not None]
        axes = ["candidate", *(name for name in searching.plan.space if name != "learning_rate")]
        return as_table((result_row(trial, result, trial.values, tuned=True) for trial, result in known), axes)

    searching = Searching(scale, changes, store, folder, run)
    os.makedirs(store.folder, exist_ok=True)
    try:
        searching.search_all()
    finally:
        write(table())
    return table()


def _result(store: Store, trial: Trial) -> Json | None:
    """The result of a trial that has ended or failed; None of one that is paused or has not begun."""
    outcome = store.result(trial) or store.outcome(trial)
    return None if outcome is None or outcome["status"] not in (*ENDED, Status.FAILED) else outcome
