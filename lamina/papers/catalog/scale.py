"""One scale of a study as data: its axes, learning rates, seeds, measures and stages; read from YAML and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from lamina.core.json_types import Json
from lamina.core.values import existing_file, is_finite, seed_number
from lamina.errors import UserError, unknown
from lamina.jobs.settings import Settings
from lamina.papers.trials.jobs import JOBS, TrialJob

MOST_SEEDS = 1000
"""Each seed is a trial of every arm: a number above is a seed that was meant as one, not as how many."""


def known(where: str, data: Mapping[str, object], allowed: Iterable[str]) -> None:
    """Raise UserError for an entry that is not among the allowed ones."""
    names = tuple(allowed)
    for key in data:
        if key not in names:
            raise unknown(f"field in {where.strip().rstrip(':')}", str(key), names)


def mapping(where: str, data: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return an entry that is a mapping; an empty one if it is missing."""
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise UserError(f"{where}{key}: {value!r} (allowed: a mapping)")
    return value


def text(where: str, data: Mapping[str, object], key: str, default: str | None = None) -> str:
    """Return an entry that is a text; ``default`` if it is missing."""
    value = data.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"{where}{key}: {value!r} (allowed: a text)")
    return value


def mappings(where: str, data: Mapping[str, object], key: str) -> tuple[Json, ...]:
    """Return an entry that is a list of mappings; an empty one if it is missing."""
    value = data.get(key, ())
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        raise UserError(f"{where}{key}: {value!r} (allowed: a list of mappings)")
    return tuple(dict(one) for one in value)


def whole(where: str, value: object, low: int) -> int:
    """An entry that is a whole number of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{where}: {value!r} (allowed: a whole number of at least {low})")
    return value


def read_seeds(where: str, given: object) -> tuple[int, ...]:
    """Read seeds: a number of them from 0, or a list."""
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_SEEDS:
        return tuple(range(given))
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        seeds = tuple(seed_number("seed", seed) for seed in given)
        if len(set(seeds)) == len(seeds) <= MOST_SEEDS:
            return seeds
    raise UserError(f"{where}: {given!r} (allowed: how many, at most {MOST_SEEDS}, or a list of different seeds)")


def read_skip(where: str, data: Mapping[str, object], axes: Mapping[str, Mapping[str, Json]]) -> tuple[Json, ...]:
    """Read the patterns under ``skip``: per axis, a label or a list of labels that the axis has."""
    patterns = mappings(where, data, "skip")
    for axis, given in (item for pattern in patterns for item in pattern.items()):
        if axis not in axes:
            raise UserError(f"{where}skip: {axis!r} is not an axis (allowed: {', '.join(axes)})")
        labels = [str(label) for label in (given if isinstance(given, list) else [given])]
        if not any(label in axes[axis] for label in labels):
            raise unknown(f"label in {where}skip: {axis}", ", ".join(labels), axes[axis])
    return patterns


Rule = Literal["best", "one-se"]
WIDENINGS = 2
"""How often a sweep is widened whose best rate is at its edge, where the study does not say it."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search for each arm's best learning rate.

    Attributes:
        rates: each is tried with every tuning seed.
        seeds: the tuning seeds: the first so many of the study's, or a list of others that no claim sees.
        rule: which rate is an arm's: the ``best``, or with ``one-se`` the lowest that is as good but for noise.
        widen: how often a sweep is widened whose best rate is at its edge.
        also: per label of an axis, another label of it. The first's arms are trained at the best rate of the second's,
            too, with all seeds: the papers compare at one rate for all.
    """

    rates: tuple[float, ...]
    seeds: int | tuple[int, ...]
    rule: Rule = "best"
    widen: int = WIDENINGS
    also: Mapping[str, str] = field(default_factory=dict)

    def sweep(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """The tuning seeds of a study with these seeds."""
        return seeds[: self.seeds] if isinstance(self.seeds, int) else self.seeds

    def other(self, values: Mapping[str, str]) -> dict[str, str] | None:
        """Return the values of the other arm whose best rate this arm is trained at, too; None if there is none."""
        for axis, label in values.items():
            if label in self.also:
                return {**values, axis: self.also[label]}
        return None


def read_rates(where: str, given: object) -> tuple[tuple[float, ...], Tuning | None]:
    """Read a scale's ``learning_rate``: the rates of a sweep, or how to tune them. Raises UserError."""
    if given is None:
        return (), None
    if isinstance(given, Mapping):
        place = f"{where}learning_rate: "
        known(place, given, {"tune", "seeds", "rule", "widen", "also"})
        seeds = given.get("seeds", 1)
        if (rule := given.get("rule", "best")) not in get_args(Rule):
            raise unknown(f"rule in {place.strip().rstrip(':')}", str(rule), get_args(Rule))
        pairs = {str(label): str(other) for label, other in mapping(place, given, "also").items()}
        return (), Tuning(
            rates=_numbers(where, given.get("tune")),
            seeds=whole(f"{place}seeds", seeds, 1) if isinstance(seeds, int) else read_seeds(f"{place}seeds", seeds),
            rule=cast(Rule, rule),
            widen=whole(f"{place}widen", given.get("widen", WIDENINGS), 0),
            also=pairs,
        )
    return _numbers(where, given), None


def check_seeds(where: str, tuning: Tuning | None, seeds: tuple[int, ...]) -> None:
    """Raise UserError for tuning seeds that a study with these seeds can't have."""
    if tuning is None:
        return
    if isinstance(tuning.seeds, tuple) and (both := [seed for seed in tuning.seeds if seed in seeds]):
        raise UserError(f"{where}seed {both[0]} tunes the rates (allowed: seeds that are not among {[*tuning.seeds]})")
    if tuning.rule == "one-se" and len(tuning.sweep(seeds)) < 2:
        raise UserError(f"{where}learning_rate: rule: 'one-se' with one tuning seed (allowed: with at least two)")


def check_also(where: str, tuning: Tuning | None, axes: Mapping[str, Mapping[str, object]]) -> None:
    """Raise UserError for an entry of ``also`` whose two labels are not two of one axis."""
    for label, other in ({} if tuning is None else tuning.also).items():
        labels = next((labels for labels in axes.values() if label in labels), None)
        if labels is None:
            raise unknown(
                f"label in {where}learning_rate: also", label, [name for each in axes.values() for name in each]
            )
        if other not in labels or other == label:
            rest = [name for name in labels if name != label]
            raise unknown(f"label in {where}learning_rate: also: {label}", other, rest)


def _numbers(where: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"{where}learning_rate: {values!r} (allowed: a list of rates, or tune: with one)")
    read = []
    for value in values:
        number = float(value) if isinstance(value, str) and _is_number(value) else value
        if not is_finite(number) or number <= 0:
            raise UserError(f"{where}learning_rate: {value!r} (allowed: numbers above 0)")
        read.append(float(number))
    if len(set(read)) < len(read):
        raise UserError(f"{where}learning_rate: {values!r} names one twice")
    return tuple(read)


def _is_number(text: str) -> bool:
    try:  # YAML reads 1e-3 as a text
        float(text)
    except ValueError:
        return False
    return True


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
        """Raise UserError for a missing file of the stage now, before all earlier stages have run."""
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
    """Read the stages under ``then``; ``first``: the label of the scale's own trials.

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
            raise UserError(f"{where}of: {axis}: {label!r} is not in any arm (allowed: values of {', '.join(axes)})")
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
    """Return by setting the earlier stage whose model it takes, from one name (the main input) or a mapping."""
    inputs = {job.inputs[0]: given} if not isinstance(given, Mapping) else dict(given)
    for setting, stage in inputs.items():
        if setting not in job.inputs:
            raise unknown(f"setting in {where}from".replace(": ", " "), str(setting), job.inputs)
        if stage not in earlier:
            raise unknown(f"stage in {where}from".replace(": ", " "), str(stage), earlier)
    if job.inputs[0] not in inputs:
        raise UserError(f"{where}from: {given!r} (needed: {job.inputs[0]})")
    return {str(setting): str(stage) for setting, stage in inputs.items()}
