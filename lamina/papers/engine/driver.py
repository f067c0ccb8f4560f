"""Runs the trials that a plan wants and the store does not have, until the plan wants no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lamina.core.json_types import Json
from lamina.jobs.status import ENDED
from lamina.papers.engine.plan import StudyPlan
from lamina.papers.trials.store import Store
from lamina.papers.trials.trial import StudyTrial
from lamina.studies.running import Executor, run_tasks, run_trials

Known = Callable[[StudyTrial], Json | None]


def runnable(trials: Iterable[StudyTrial], store: Store, known: Known) -> dict[str, StudyTrial]:
    """Return by key the trials that can start now; a trial that must wait is replaced by those that it waits for.

    A trial whose result only the records have is run again where its model is needed.
    """
    found: dict[str, StudyTrial] = {}

    def visit(trial: StudyTrial) -> None:
        lacking = [source for source in trial.inputs.values() if not store.has_model(source)]
        for source in lacking:
            visit(source)
        if not lacking:
            found[trial.key] = trial

    for trial in trials:
        if known(trial) is None:
            visit(trial)
    return found


def blocked(trial: StudyTrial, failed: Mapping[str, Json]) -> Json | None:
    """Return the result "failed" for a trial if one of its inputs has failed, or else None."""
    for source in trial.inputs.values():
        result = failed.get(source.key)
        if result is None or result["status"] in ENDED:  # it ended, and only a measurement failed
            result = blocked(source, failed)
        if result is not None:
            return {"status": "failed", "reason": f"it starts from a trial that is {result['status']}: {source.name}"}
    return None


def run_plan(
    plan: StudyPlan,
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

    def known(trial: StudyTrial) -> Json | None:
        return failed.get(trial.key) or store.complete(trial) or blocked(trial, failed)

    def result(trial: StudyTrial) -> Json | None:
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
        # What ended without its measures, or without a model that another trial needs, would be run for ever.
        for key, trial in todo.items():
            if key not in failed and store.complete(trial) is None and (found := store.result(trial)) is not None:
                failed[key] = found
        needed = {source.key for trial in wanted if known(trial) is None for source in trial.inputs.values()}
        lost = [key for key, trial in todo.items() if key in needed and not store.has_model(trial)]
        failed.update({key: {"status": "failed", "reason": "it left no model"} for key in lost})
