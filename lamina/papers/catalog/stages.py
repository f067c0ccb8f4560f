"""The stages of a scale: the jobs that follow its first one, each on the models that earlier stages left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.values import existing_file
from lamina.errors import UserError, unknown
from lamina.jobs.settings import Settings
from lamina.papers.catalog.entries import known, mapping, read_skip, text
from lamina.papers.trials.jobs import JOBS, TrialJob

STAGE = "stage"
"""The axis that the trials of a scale with stages have beside the scale's own."""
RECORDS = ("metrics", "layers", "held_out")
"""The training records that can be measured; ``held_out``, reward and KL by prompt, is a policy's."""
SOURCES = ("data", "eval_data", "reward_function")
"""The settings of a stage that name files."""
_FIELDS = ("job", "from", "of", "settings", "skip", "records")
ENGINE = {
    "output": "--store, the folder of all trials",
    "threads": "--threads",
    "pause_step": "steps, which end a trial with its schedule",
    "push_to_hub": "to push the model of a trial by hand",
}
"""Settings of a trial that are not a study's to say, with what is."""
_DECIDED = ("seed", *ENGINE)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        name: its label on the axis ``stage``.
        job: what its trials are: a name in ``JOBS``.
        settings: of its trials.
        inputs: by setting, the stage whose model it takes.
        of: values of axes: the stage runs for this arm alone, and the stages after it take that one's model. So all
            arms may share one reward model. Empty: it runs for every arm.
        skip: patterns of axis values for which the stage, and all that need it, are left out.
        measures: the training records that are kept, as "records/NAME".
        folder: of the study's file; files that begin with ``./`` are relative to it.
    """

    name: str
    job: str
    settings: Json = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    of: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[Json, ...] = ()
    measures: tuple[str, ...] = ()
    folder: Path = Path()

    @property
    def record(self) -> TrialJob:
        """The job of its trials."""
        return JOBS[self.job]

    def trial(self, seed: int) -> Settings:
        """The settings of a trial, without its inputs. Raises UserError that names the setting."""
        settings = dict(self.settings)
        for name in self.record.files:
            if str(settings.get(name, "")).startswith("./"):
                settings[name] = str(self.folder / str(settings[name])[2:])
        return self.record.settings_class().from_dict({**settings, **({"seed": seed} if self.record.seeded else {})})

    def refuse_missing(self) -> None:
        """Raise UserError for a file that the stage names and that is not there: it would be found after all others."""
        settings = self.trial(seed=0).to_dict()
        for name in self.record.files:
            for part in str(settings[name] or "").split(",") if name in SOURCES else ():
                try:
                    existing_file(name, part.strip())
                except UserError as error:
                    raise UserError(f"then: {self.name}: {error}") from None


def read_stages(
    where: str, data: Mapping[str, object], first: str, axes: Mapping[str, Mapping[str, Json]], folder: Path
) -> tuple[Stage, ...]:
    """The stages under ``then``, in their order; ``first``: the label of the scale's own trials.

    Raises UserError that names the stage and the field.
    """
    stages: dict[str, Stage] = {}
    listed = mapping(where, data, "then")
    if listed and STAGE in axes:
        raise UserError(f"{where}axes: {STAGE!r} is the axis of the stages (allowed: another name)")
    for name, entry in listed.items():
        place = f"{where}then: {name}: "
        if name == first or not isinstance(entry, Mapping):
            raise UserError(
                f"{place}{entry!r} (allowed: a name other than {first!r}, and a mapping with job, settings)"
            )
        stages[name] = _read_stage(place, str(name), entry, (first, *stages), axes, folder)
    return tuple(stages.values())


def _read_stage(
    where: str,
    name: str,
    data: Mapping[str, object],
    earlier: Sequence[str],
    axes: Mapping[str, Mapping[str, Json]],
    folder: Path,
) -> Stage:
    known(where, data, _FIELDS)
    starting = [each.name for each in JOBS.values() if each.inputs]
    job = text(where, data, "job", default=name)
    if job not in starting:
        raise unknown(f"job in {where.strip().rstrip(':')}", job, starting)
    settings = dict(mapping(where, data, "settings"))
    record = JOBS[job].settings_class()
    decided = {*_DECIDED, *JOBS[job].inputs, *(record.undecided() - {*JOBS[job].files})}
    allowed = [each for each in record.names() if each not in decided]
    for setting in settings:
        if setting not in allowed:
            raise unknown(f"setting in {where.strip().rstrip(':')}", str(setting), allowed)
    of = {str(axis): str(label) for axis, label in mapping(where, data, "of").items()}
    for axis, label in of.items():
        if axis not in axes or label not in axes[axis]:
            raise UserError(f"{where}of: {axis}: {label!r} is no arm's (allowed: values of {', '.join(axes)})")
    records = data.get("records", ())
    for record in records if isinstance(records, Sequence) else (records,):
        if record not in RECORDS:
            raise unknown(f"record in {where.strip().rstrip(':')}", str(record), RECORDS)
    stage = Stage(
        name=name,
        job=job,
        settings=settings,
        inputs=_inputs(where, data.get("from", earlier[0]), JOBS[job], earlier),
        of=of,
        skip=read_skip(where, data, axes),
        measures=tuple(f"records/{record}" for record in records) if isinstance(records, Sequence) else (),
        folder=folder,
    )
    stage.trial(seed=0)
    return stage


def _inputs(where: str, given: object, job: TrialJob, earlier: Sequence[str]) -> dict[str, str]:
    """By setting, the earlier stage whose model it takes: one name for the main input, or one by setting."""
    inputs = {job.inputs[0]: given} if not isinstance(given, Mapping) else dict(given)
    for setting, stage in inputs.items():
        if setting not in job.inputs:
            raise unknown(f"setting in {where}from".replace(": ", " "), str(setting), job.inputs)
        if stage not in earlier:
            raise unknown(f"stage in {where}from".replace(": ", " "), str(stage), earlier)
    if job.inputs[0] not in inputs:
        raise UserError(f"{where}from: {given!r} (needed: {job.inputs[0]})")
    return {str(setting): str(stage) for setting, stage in inputs.items()}
