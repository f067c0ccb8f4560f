"""Runs the trials that a plan wants and the store does not have, until the plan wants no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lamina.core.json_types import Json
from lamina.jobs.status import ENDED
from lamina.papers.engine.chains import blocked, runnable, without_model
from lamina.papers.engine.plan import Plan
from lamina.papers.trials.store import Store
from lamina.papers.trials.trial import Trial
from lamina.studies.running import Executor, run_tasks
from lamina.studies.workers import run_trials


def run_plan(
    plan: Plan,
    store: Store,
    *,
    workers: int | None,
    bar: bool,
    ended: Callable[[], None] = lambda: None,
    execute: Executor = run_trials,
) -> dict[str, Json]:
    """Run what is missing; returns every trial's result by its key. ``ended`` is called after each trial.

    A trial that failed in this call is not tried again: its result says why.

    Raises:
        OSError: the disk is full; what was finished is kept.
        KeyboardInterrupt: after the running trials have ended as `interrupted`.
    """
    failed: dict[str, Json] = {}

    def known(trial: Trial) -> Json | None:
        return failed.get(trial.key) or store.complete(trial) or blocked(trial, failed)

    def result(trial: Trial) -> Json | None:
        return store.result(trial) or failed.get(trial.key) or blocked(trial, failed)

    while True:
        wanted = plan.wanted(result)
        todo = runnable(wanted, store, known)
        if not todo:
            return {trial.key: found for trial in wanted if (found := result(trial)) is not None}
        tasks = {trial.name: store.task(trial) for trial in todo.values()}
        keys = {trial.name: trial.key for trial in todo.values()}
        lacking = {trial.key for trial in wanted if known(trial) is None}  # some only a measure
        done = len({trial.key for trial in wanted} - lacking - {*todo})
        waiting = len(lacking - {*todo})

        def one_ended(name: str, outcome: Json, keys: dict[str, str] = keys) -> None:
            if outcome["status"] not in ENDED:
                failed[keys[name]] = outcome
            ended()

        run_tasks(tasks, done=done, waiting=waiting, workers=workers, bar=bar, ended=one_ended, execute=execute)
        failed.update(_unmeasured(todo, store, failed))
        failed.update(without_model(todo, [trial for trial in wanted if known(trial) is None], store))


def _unmeasured(todo: Mapping[str, Trial], store: Store, failed: Mapping[str, Json]) -> dict[str, Json]:
    """Trials that ended but whose measures are still missing: they would be tried for ever."""
    return {
        key: result
        for key, trial in todo.items()
        if key not in failed and store.complete(trial) is None and (result := store.result(trial)) is not None
    }
