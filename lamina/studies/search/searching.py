"""Runs a search: Optuna proposes, rungs prune by halving, a race over paired seeds prunes by Wilcoxon's test.

Everything that was proposed and seen is in SEARCH, a journal that Optuna reads again on --resume; the trials are in the
store like any others, so a killed search repeats nothing. Only text is stored: no pickles.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.status import ENDED
from lamina.studies.catalog.arms import resolved
from lamina.studies.catalog.space import Search
from lamina.studies.catalog.study import Scale
from lamina.studies.search.candidates import (
    LOST_LOSS,
    Candidate,
    best_at,
    has_failed,
    in_order,
    loss_at,
    loss_of,
    worse,
)
from lamina.studies.trials.store import Store
from lamina.studies.trials.task import Task
from lamina.studies.trials.trial import Trial, make_trial

if TYPE_CHECKING:
    import optuna
    import pandas as pd

SEARCH = "search.journal"
Run = Callable[[Mapping[str, Task]], None]


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
        self.candidates: dict[int, Candidate] = {}  # by the number that Optuna gave the proposal

    def search_all(self) -> None:
        """Propose, run and prune until the search is done.

        Raises UserError for settings that a candidate can't have, and for a candidate of an earlier call that is
        another trial now.
        """
        self._climb()
        finalists: dict[str, Candidate] = {}  # what was proposed twice races once
        for candidate in sorted((c for c in self.candidates.values() if c.state == "finished"), key=lambda c: c.rank):
            finalists.setdefault(candidate.key, candidate)
        self._race(list(finalists.values())[: self.plan.race])

    def _study(self) -> optuna.Study:
        pruner = self.optuna.pruners.NopPruner()  # Optuna's compare one trial after the other, not whole batches
        return self.optuna.create_study(study_name="rungs", storage=self.storage, pruner=pruner, load_if_exists=True)

    def _sampler(self, asked: int) -> optuna.samplers.BaseSampler:
        """The sampler of a candidate, whose random numbers depend on how many were proposed before it."""
        samplers = self.optuna.samplers
        make = samplers.TPESampler if self.plan.sampler == "tpe" else samplers.RandomSampler
        return make(seed=self.plan.seed + asked)

    def _climb(self) -> None:
        """Propose in batches; run each batch rung by rung, and prune by successive halving.

        A batch that a kill cut short is ended before the next one is proposed: a resumed search proposes what an
        uninterrupted one does.
        """
        study, seed = self._study(), self.scale.seeds[0]
        batch = self._reopen(study)
        while batch or len(self.candidates) < self.plan.trials:
            while len(self.candidates) < self.plan.trials and (len(self.candidates) % self._batch or not batch):
                batch.append(self._ask(study))
            for place, rung in enumerate([*self.plan.rungs, None]):
                climbing = [self.candidates[trial.number] for trial in batch]
                self._run([(c, seed) for c in climbing if place not in c.rungs], rung)
                batch = [trial for trial in batch if self._reaches(study, trial, place)]
                batch = self._best_of(study, batch, place)

    @property
    def _batch(self) -> int:
        return max(self.plan.keep**2, 4)

    def _ask(self, study: optuna.Study) -> optuna.Trial:
        asked = sum("settings" in known.user_attrs for known in study.get_trials(deepcopy=False))
        study.sampler = self._sampler(asked)  # not where the stream began: a resumed search would repeat it
        trial = study.ask()
        candidate = Candidate(number=asked, settings=self.plan.propose(trial))
        candidate.key = self.trial(candidate, self.scale.seeds[0]).key
        trial.set_user_attr("key", candidate.key)
        trial.set_user_attr("settings", candidate.settings)  # the last one: it says that the proposal is whole
        self.candidates[trial.number] = candidate
        return trial

    def _reopen(self, study: optuna.Study) -> list[optuna.Trial]:
        """Know the candidates of an earlier call again; returns those that it left open."""
        left = []
        for known in study.get_trials(deepcopy=False):
            if "settings" not in known.user_attrs:  # killed between the question and the answer
                if not known.state.is_finished():
                    study.tell(known.number, state=self.optuna.trial.TrialState.FAIL)
                continue
            candidate = Candidate(number=len(self.candidates), settings=known.user_attrs["settings"])
            candidate.key = self.trial(candidate, self.scale.seeds[0]).key
            _refuse_another(candidate, known.user_attrs.get("key"))
            self.candidates[known.number] = candidate
            candidate.rungs = dict(known.intermediate_values)
            if not known.state.is_finished():
                left.append(self.optuna.trial.Trial(study, known._trial_id))
            elif known.state.name == "COMPLETE":
                self._finish(candidate)
            elif (last := candidate.rungs[max(candidate.rungs)]) < LOST_LOSS:
                candidate.state, candidate.loss = "pruned", last
            else:
                candidate.state = "diverged"
        return left

    def _reaches(self, study: optuna.Study, trial: optuna.Trial, place: int) -> bool:
        """Whether a candidate trained up to a rung, and has more to do; what it came to is told.

        One that failed stays open: the next call tries it again.
        """
        candidate = self.candidates[trial.number]
        if place in candidate.rungs:  # an earlier call was here
            return True
        result = self._result(candidate, self.scale.seeds[0])
        if has_failed(result):
            candidate.state = "failed"
            return False
        if result["status"] == "diverged":
            candidate.state, candidate.rungs[place] = "diverged", LOST_LOSS
            trial.report(LOST_LOSS, place)
            study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)  # of FAIL the sampler learns nothing
            return False
        if place == len(self.plan.rungs):
            self._finish(candidate)
            study.tell(trial, float(result["eval_loss"]))
            return False
        candidate.rungs[place] = loss_at(self.store.folder / candidate.key, self.plan.rungs[place], result)
        trial.report(candidate.rungs[place], place)
        return True

    def _finish(self, candidate: Candidate) -> None:
        candidate.state = "finished"
        candidate.count([self._result(candidate, self.scale.seeds[0])])

    def _best_of(self, study: optuna.Study, batch: Sequence[optuna.Trial], place: int) -> list[optuna.Trial]:
        """The trials of a batch that go on from a rung: those among the best of all that came to it so far."""
        going, best = [], best_at(self.candidates.values(), place, self.plan.keep)
        for trial in batch:
            candidate = self.candidates[trial.number]
            if candidate.number in best:
                going.append(trial)
            else:
                candidate.state, candidate.loss = "pruned", candidate.rungs[place]
                study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
        return going

    def _race(self, finalists: list[Candidate]) -> None:
        """Run the finalists with all seeds, one seed after the other; drop those that are worse."""
        seen: dict[int, dict[int, Json]] = {candidate.number: {} for candidate in finalists}
        running = list(finalists)
        for seed in self.scale.seeds:
            self._run([(candidate, seed) for candidate in running], None)
            for candidate in running:
                if (result := self._result(candidate, seed))["status"] in ENDED:
                    seen[candidate.number][seed] = result
                candidate.count(seen[candidate.number].values())
            losses = {number: {s: loss_of(one) for s, one in results.items()} for number, results in seen.items()}
            best = min(running, key=lambda c: c.rank, default=None)
            for candidate in [c for c in running if c is not best]:
                if best is not None and worse(losses[candidate.number], losses[best.number]):
                    candidate.state = "dropped in the race"
                    running.remove(candidate)
        for candidate in running:
            candidate.state = "raced"
        if running:
            min(running, key=lambda c: c.rank).state = "won"

    def table(self) -> pd.DataFrame:
        """A row per candidate, the best first.

        Its settings, how far it came, its loss (see ``Candidate``), with how
        many seeds it ran to the end, and how many of them diverged or got stuck.
        """
        import pandas as pd

        rows = [
            {
                "candidate": candidate.number,
                **candidate.settings,
                "state": candidate.state,
                "eval_loss": candidate.loss,
                "seeds": candidate.seeds,
                "lost": candidate.lost,
            }
            for candidate in in_order(self.candidates.values())
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

    def _run(self, wanted: Sequence[tuple[Candidate, int]], rung: int | None) -> None:
        """Run trials to a rung, or to their end."""
        tasks = {}
        for candidate, seed in wanted:
            trial = self.trial(candidate, seed)
            if self.store.result(trial) is None and not self._has_paused(trial, rung):
                task = self.store.task(trial)
                tasks[trial.name] = replace(task, settings=replace(task.settings, pause_step=rung))
        if tasks:
            self.run(tasks)

    def _has_paused(self, trial: Trial, rung: int | None) -> bool:
        result = self.store.outcome(trial)
        return rung is not None and result is not None and int(result.get("steps") or 0) >= rung

    def _result(self, candidate: Candidate, seed: int) -> Json:
        trial = self.trial(candidate, seed)
        return self.store.result(trial) or self.store.outcome(trial) or {"status": "failed"}


def _refuse_another(candidate: Candidate, key: str | None) -> None:
    """Raise UserError for a candidate of an earlier call whose trial is another one now."""
    if key not in (None, candidate.key):
        raise UserError(
            f"study: candidate {candidate.number} of its search is another trial than when it ran here: its text, "
            "another file that it names, or Lamina's training has changed (allowed: another --output; or --overwrite, "
            "which keeps all trials in the store)"
        )


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError("search: Optuna is not installed (pip install 'lamina[search]')") from None
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna
