"""Runs a search: Optuna proposes, rungs prune by halving, a race over paired seeds prunes by Wilcoxon's test.

Everything that was proposed and seen is in SEARCH, a journal that Optuna reads again on --resume; the trials are in the
store like any others, so a killed search repeats nothing. Only text is stored: no pickles.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_result
from lamina.jobs.status import ENDED
from lamina.studies.catalog.arms import resolved
from lamina.studies.catalog.space import Search
from lamina.studies.catalog.study import Scale
from lamina.studies.trials.store import Store
from lamina.studies.trials.task import Task
from lamina.studies.trials.trial import Trial, make_trial

if TYPE_CHECKING:
    import optuna
    import pandas as pd

SEARCH = "search.journal"
WORST_P = 0.1
"""A candidate leaves the race if Wilcoxon's test on the shared seeds says with this p that it is worse."""
FAILED_LOSS = 100.0
"""The loss of a candidate that diverged or failed: worse than any that a run can have, and finite."""
Run = Callable[[Mapping[str, Task]], None]


@dataclass
class Candidate:
    """What Optuna proposed: its settings, and its place in the study."""

    number: int
    settings: Json
    loss: float = math.inf
    seeds: int = 0
    state: str = "proposed"


class Searching:
    """A search of one scale of a study.

    Args:
        scale: with a search.
        changes: the user's settings over the scale's own.
        store: of the trials.
        folder: the study's; the journal stands there.
        run: runs tasks.
    """

    def __init__(self, scale: Scale, changes: Json, store: Store, folder: Path, run: Run):
        assert scale.search is not None
        self.scale, self.changes, self.store, self.run = scale, changes, store, run
        self.plan: Search = scale.search
        self.optuna = _optuna()
        self.storage = self.optuna.storages.JournalStorage(
            self.optuna.storages.journal.JournalFileBackend(str(folder / SEARCH))
        )
        self.candidates: dict[int, Candidate] = {}

    def search_all(self) -> None:
        """Propose, run and prune until the search is done."""
        self._climb()
        finalists = sorted((c for c in self.candidates.values() if c.state == "finished"), key=lambda c: c.loss)
        self._race(finalists[: self.plan.race])

    def _in_order(self) -> list[Candidate]:
        order = {"won": 0, "raced": 1, "finished": 2, "dropped in the race": 3, "pruned": 4, "failed": 5}
        return sorted(self.candidates.values(), key=lambda c: (order.get(c.state, 6), c.loss))

    def _study(self, name: str, pruner: Any) -> optuna.Study:
        return self.optuna.create_study(
            study_name=name,
            storage=self.storage,
            pruner=pruner,
            load_if_exists=True,
        )

    def _sampler(self, asked: int) -> optuna.samplers.BaseSampler:
        """The sampler of a candidate, whose random numbers depend on how many were proposed before it."""
        samplers = self.optuna.samplers
        make = samplers.TPESampler if self.plan.sampler == "tpe" else samplers.RandomSampler
        return make(seed=self.plan.seed + asked)

    def _climb(self) -> None:
        """Propose in batches; run each batch rung by rung, and prune by successive halving."""
        rungs = [*self.plan.rungs, None]
        pruner = self.optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=self.plan.keep)
        study = self._study("rungs", pruner if self.plan.rungs else self.optuna.pruners.NopPruner())
        open_trials = self._reopen(study)
        while open_trials or len(study.trials) < self.plan.trials:
            batch = open_trials
            while len(batch) < self._batch and len(study.trials) < self.plan.trials:
                batch.append(self._ask(study))
            open_trials = []
            for rung in rungs:
                self._run({t.number: (self.candidates[t.number], self.scale.seeds[0]) for t in batch}, rung)
                batch = [trial for trial in batch if self._goes_on(study, trial, rung)]

    @property
    def _batch(self) -> int:
        return max(self.plan.keep**2, 4)

    def _ask(self, study: optuna.Study) -> optuna.Trial:
        study.sampler = self._sampler(len(study.trials))  # not where the stream began: a resumed search would repeat it
        trial = study.ask()
        settings = self.plan.propose(trial)
        trial.set_user_attr("settings", settings)
        self.candidates[trial.number] = Candidate(number=trial.number, settings=settings)
        return trial

    def _reopen(self, study: optuna.Study) -> list[optuna.Trial]:
        """Know the candidates of an earlier call again; returns those that it left open."""
        left = []
        for known in study.get_trials(deepcopy=False):
            settings = known.user_attrs.get("settings")
            if settings is None:  # killed between the question and the answer
                if not known.state.is_finished():
                    study.tell(known.number, state=self.optuna.trial.TrialState.FAIL)
                continue
            candidate = Candidate(number=known.number, settings=settings)
            self.candidates[known.number] = candidate
            if known.state.is_finished():
                values = list(known.intermediate_values.values())
                candidate.loss = known.value if known.value is not None else (values[-1] if values else math.inf)
                candidate.seeds = int(known.state.name == "COMPLETE")  # the race counts further ones
                candidate.state = {"COMPLETE": "finished", "PRUNED": "pruned"}.get(known.state.name, "failed")
            else:
                left.append(self.optuna.trial.Trial(study, known._trial_id))
        return left

    def _goes_on(self, study: optuna.Study, trial: optuna.Trial, rung: int | None) -> bool:
        candidate = self.candidates[trial.number]
        result = self._result(candidate, self.scale.seeds[0])
        loss = _loss(result)
        candidate.loss = loss
        states = self.optuna.trial.TrialState
        if loss >= FAILED_LOSS:
            candidate.state = "failed"
            study.tell(trial, state=states.FAIL)
            return False
        if rung is None:
            candidate.state, candidate.seeds = "finished", 1
            study.tell(trial, loss)
            return False
        trial.report(loss, self.plan.keep ** self.plan.rungs.index(rung))  # the resources that the pruner expects
        if trial.should_prune():
            candidate.state = "pruned"
            study.tell(trial, state=states.PRUNED)
            return False
        return True

    def _race(self, finalists: list[Candidate]) -> None:
        """Run the finalists with the other seeds, one seed after the other; drop those that are worse."""
        losses = {candidate.number: [candidate.loss] for candidate in finalists}
        running = list(finalists)
        for seed in self.scale.seeds[1:]:
            self._run({c.number: (c, seed) for c in running}, None)
            for candidate in running:
                losses[candidate.number].append(_loss(self._result(candidate, seed)))
                candidate.seeds = len(losses[candidate.number])
                candidate.loss = sum(losses[candidate.number]) / candidate.seeds
            best = min(running, key=lambda c: c.loss)
            for candidate in [c for c in running if c is not best]:
                if _worse(losses[candidate.number], losses[best.number]):
                    candidate.state = "dropped in the race"
                    running.remove(candidate)
        for candidate in running:
            candidate.state = "raced"
        if running:
            min(running, key=lambda c: c.loss).state = "won"

    def table(self) -> pd.DataFrame:
        """A row per candidate, the best first: its settings, how far it came, its mean loss, its seeds."""
        import pandas as pd

        rows = [
            {"candidate": c.number, **c.settings, "state": c.state, "eval_loss": c.loss, "seeds": c.seeds}
            for c in self._in_order()
        ]
        return pd.DataFrame(rows)

    def trials(self) -> list[Trial]:
        """Every trial that some candidate needs, run or not."""
        return [self.trial(c, seed) for c in self.candidates.values() for seed in self.scale.seeds]

    def trial(self, candidate: Candidate, seed: int) -> Trial:
        """A candidate with one seed, as any trial of a study."""
        settings = resolved({**self.scale.settings, **self.changes, **candidate.settings, "seed": seed}, self.scale)
        record = self.scale.record.settings_class().from_dict(settings)
        values = {name: str(value) for name, value in candidate.settings.items() if name != "learning_rate"}
        return make_trial(self.scale.job, {"candidate": str(candidate.number), **values}, record, ())

    def _run(self, wanted: Mapping[int, tuple[Candidate, int]], rung: int | None) -> None:
        """Run trials to a rung, or to their end."""
        tasks = {}
        for candidate, seed in wanted.values():
            trial = self.trial(candidate, seed)
            if self.store.result(trial) is None and not self._has_paused(trial, rung):
                task = self.store.task(trial)
                tasks[trial.name] = replace(task, settings=replace(task.settings, pause_step=rung))
        if tasks:
            self.run(tasks)

    def _has_paused(self, trial: Trial, rung: int | None) -> bool:
        result = read_result(self.store.folder / trial.key)
        return rung is not None and result is not None and int(result.get("steps") or 0) >= rung

    def _result(self, candidate: Candidate, seed: int) -> Json:
        trial = self.trial(candidate, seed)
        return self.store.result(trial) or read_result(self.store.folder / trial.key) or {"status": "failed"}


def _loss(result: Json) -> float:
    loss = result.get("eval_loss")
    bad = result["status"] not in (*ENDED, "interrupted") or result["status"] == "diverged"
    return FAILED_LOSS if bad or loss is None else float(loss)


def _worse(losses: list[float], best: list[float]) -> bool:
    """Whether losses are above another's on the same seeds, by Wilcoxon's one-sided test."""
    from lamina.studies.judging.statistics import wilcoxon_greater

    differences = [ours - theirs for ours, theirs in zip(losses, best, strict=True)]
    if len(differences) < 4 or not any(differences):  # with fewer, no p is below the threshold
        return False
    return wilcoxon_greater(differences) < WORST_P


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError("search: Optuna is not installed (pip install 'lamina[search]')") from None
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna
