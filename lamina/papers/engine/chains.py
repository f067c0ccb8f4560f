"""What has to run now, where trials start from the models of other trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lamina.core.json_types import Json
from lamina.jobs.status import ENDED
from lamina.papers.trials.store import Store
from lamina.papers.trials.trial import Trial

Known = Callable[[Trial], Json | None]


def runnable(trials: Iterable[Trial], store: Store, known: Known) -> dict[str, Trial]:
    """By key, the trials to run so that all get a result: those that can start, in place of those that wait for them.

    A trial whose result only the records have is run again where its model is needed.
    """
    found: dict[str, Trial] = {}

    def visit(trial: Trial) -> None:
        lacking = [source for source in trial.inputs.values() if not store.has_model(source)]
        for source in lacking:
            visit(source)
        if not lacking:
            found[trial.key] = trial

    for trial in trials:
        if known(trial) is None:
            visit(trial)
    return found


def blocked(trial: Trial, failed: Mapping[str, Json]) -> Json | None:
    """The result of a trial one of whose inputs has failed; None for any other."""
    for source in trial.inputs.values():
        found = failed.get(source.key)
        if found is None or found["status"] in ENDED:  # it ended, and only a measurement failed
            found = blocked(source, failed)
        if found is not None:
            return {"status": "failed", "reason": f"it starts from a trial that is {found['status']}: {source.name}"}
    return None


def without_model(ran: Mapping[str, Trial], waiting: Iterable[Trial], store: Store) -> dict[str, Json]:
    """The trials of ``ran`` that others wait for but that left no model: they would be run for ever."""
    needed = {source.key for trial in waiting for source in trial.inputs.values()}
    return {
        key: {"status": "failed", "reason": "it left no model"}
        for key, trial in ran.items()
        if key in needed and not store.has_model(trial)
    }
