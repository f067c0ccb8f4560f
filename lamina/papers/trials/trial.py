"""A trial of a study: its place on the study's axes, and the settings that it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.settings import Settings
from lamina.papers.trials import identity
from lamina.papers.trials.jobs import JOBS


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial, as a study needs it.

    Attributes:
        job: a name in ``JOBS``.
        values: its place on the study's axes: the label of each value.
        settings: complete; the store says where the trial is.
        measures: what is measured on it, as "TIME/NAME".
        identity: all that decides its numbers.
        key: the hash of the identity.
        inputs: by setting, the trial whose model it takes; empty for the first of a chain.
        root: the first trial of the chain; None for that trial itself.
    """

    job: str
    values: Mapping[str, str]
    settings: Settings
    measures: tuple[str, ...]
    identity: Json
    key: str
    inputs: Mapping[str, Trial] = field(default_factory=dict)
    root: Trial | None = None

    @property
    def first(self) -> Trial:
        """The first trial of the chain."""
        return self if self.root is None else self.root

    @property
    def placement(self) -> str:
        """The placement of the model."""
        return str(getattr(self.first.settings, "placement", ""))

    @property
    def learning_rate(self) -> float | None:
        """The peak learning rate of the first trial; None for a job without one."""
        return getattr(self.first.settings, "learning_rate", None)

    @property
    def seed(self) -> int:
        """The seed of the chain."""
        return int(getattr(self.first.settings, "seed", 0))

    @property
    def name(self) -> str:
        """A short name for progress lines."""
        words = [*self.values.values(), *([] if self.learning_rate is None else [f"lr {self.learning_rate:g}"])]
        return ", ".join([*words, f"seed {self.seed}"])


def may_be(trial: Trial, placement: str) -> bool:
    """Whether a placement's name may be another one for the first trial's plan: it is, or it can't be read here."""
    try:
        settings = replace(trial.settings, placement=placement)
        return identity.identity(trial.job, settings)["plan"] == trial.identity["plan"]
    except (UserError, TypeError):  # a file of another machine's
        return True


def make_trial(job: str, values: Mapping[str, str], settings: Settings, measures: tuple[str, ...]) -> Trial:
    """A trial of these settings. Raises UserError for a placement or a corpus that can't be read."""
    decided = identity.identity(job, settings)
    return Trial(
        job=job, values=values, settings=settings, measures=measures, identity=decided, key=identity.key(decided)
    )


def make_chained(
    job: str,
    values: Mapping[str, str],
    settings: Settings,
    measures: tuple[str, ...],
    *,
    inputs: Mapping[str, Trial],
    root: Trial,
) -> Trial:
    """A trial that starts from the models of other trials. Raises UserError for data that can't be read."""
    decided = identity.chained(JOBS[job], settings, {name: trial.key for name, trial in inputs.items()})
    return Trial(
        job=job,
        values=values,
        settings=settings,
        measures=measures,
        identity=decided,
        key=identity.key(decided),
        inputs=inputs,
        root=root,
    )
