"""A trial of a study: its place on the study's axes, and the settings that it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.core.json_types import Json
from lamina.jobs.settings import Settings
from lamina.studies.trials import identity


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
    """

    job: str
    values: Mapping[str, str]
    settings: Settings
    measures: tuple[str, ...]
    identity: Json
    key: str

    @property
    def learning_rate(self) -> float | None:
        """The peak learning rate; None for a job without one."""
        return getattr(self.settings, "learning_rate", None)

    @property
    def seed(self) -> int:
        """The seed."""
        return int(getattr(self.settings, "seed", 0))

    @property
    def name(self) -> str:
        """A short name for progress lines."""
        words = [*self.values.values(), *([] if self.learning_rate is None else [f"lr {self.learning_rate:g}"])]
        return ", ".join([*words, f"seed {self.seed}"])


def make_trial(job: str, values: Mapping[str, str], settings: Settings, measures: tuple[str, ...]) -> Trial:
    """A trial of these settings. Raises UserError for a placement or a corpus that can't be read."""
    decided = identity.identity(job, settings)
    return Trial(
        job=job, values=values, settings=settings, measures=measures, identity=decided, key=identity.key(decided)
    )
