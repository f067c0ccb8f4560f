"""Read and check studies from YAML files.

A study has up to three scales: cpu, gpu and paper. For each scale, the YAML file lists the compared settings, learning
rates, seeds, measurements, and jobs that start from the trained models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from lamina.core.json_types import Json
from lamina.core.values import existing_file, is_finite, seed_number
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError, unknown
from lamina.jobs import columns
from lamina.jobs.settings import Settings
from lamina.lab.papers.trials.jobs import TRIAL_JOBS, TrialJob
from lamina.probes.engine.registry import check_probe

Axes: TypeAlias = Mapping[str, Mapping[str, Json]]
"""The compared settings (axes). Each axis maps the labels of its values to settings."""
BASES = "bases.yaml"
_RECORDS = "lamina_records"
PAPERS = ("fusenorm", "keel", "mix_ln", "peri_ln", "field")
SCALES = ("cpu", "gpu", "paper")
TIMES = ("init", "end", "records")
MOST_SEEDS = 1000
"""The largest number of seeds of a study. A user who gives a larger number probably means one seed."""
_STUDY = ("study", "paper", "source", "title", "question", "scales", "figures", "notes")
_SCALE = (
    *("base", "settings", "axes", "measures", "job", "skip", "needs", "looks", "then"),
    *("notes", "figures"),
)
_STAGE = ("job", "from", "of", "settings", "skip", "records")
STAGE = "stage"
"""The table column with the job of each row, in studies with several jobs."""
RECORDS = ("metrics", "layers", "held_out")
"""The training records that a study can keep. "held_out" has a policy's reward and KL for each prompt."""
SOURCES = ("data", "eval_data", "reward_function")
"""The settings that name a job's input files."""
ENGINE = {
    "output": "--store, the folder of all trials",
    "threads": "--threads",
    "run_code": "--run-code",
    "pause_step": "steps, which sets the full length of a trial",
    "push_to_hub": "`hf upload` after the trial",
}
"""The settings that a study cannot change, each with a text that names the alternative."""
TAKEN = frozenset(
    (
        *(*columns.names(), "key", "tuned", "at_edge", STAGE, "candidate"),
        *("metric", "value", "layer", "sublayer", "role", "index", "step", "loss"),
        *("label", "panel", "line", "rest", "place", "y", "mean", "std", "low", "high", "trained", "trials", "ended"),
    )
)
"""The column names of Lamina's tables. A compared setting cannot have one of these names."""


def catalog_folder() -> Path:
    """Return the folder of Lamina's own studies."""
    repository = Path(__file__).parents[3] / "studies"
    return repository if (repository / BASES).is_file() else Path(__file__).parent / "studies"


def records_folder() -> Path:
    """Return the folder of recorded results of Lamina's own studies. The folder may be missing."""
    spec = find_spec(_RECORDS)
    installed = list(spec.submodule_search_locations or ()) if spec else []
    folder = catalog_folder() / "records"
    return Path(installed[0]) if installed and not folder.is_dir() else folder


def names() -> list[str]:
    return sorted(path.stem for path in catalog_folder().glob("*.yaml") if path.name != BASES)


def find(study: str) -> Path:
    """Return the path of a study's YAML file. Raises UserError if no study has this name or path."""
    path = Path(study)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"study: {study!r} is not a file. Give a YAML file, or a name from `lamina study list`.")
        return path.resolve()
    if study not in (studies := names()):
        raise unknown("study", study, studies)
    return catalog_folder() / f"{study}.yaml"


Rule = Literal["best", "one-se"]
WIDENINGS = 2
"""The default of ``Tuning.widen``."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search for each configuration's best learning rate."""

    rates: tuple[float, ...]  # the learning rates to try
    # the seeds of the search: a list of seeds, or a number n for the study's first n seeds
    seeds: int | tuple[int, ...]
    # how to choose a learning rate, "best" or "one-se" (see ``lamina.lab.papers.engine.plan.best_rate``)
    rule: Rule = "best"
    # the largest number of added learning rates. Lamina adds a learning rate if the best is the lowest or highest
    widen: int = WIDENINGS
    # pairs of labels. A configuration with the first label also trains at the best learning rate of the configuration
    # with the second label
    also: Mapping[str, str] = field(default_factory=dict)
    settings: Json = field(default_factory=dict)  # settings that differ during the search, such as fewer steps

    def sweep(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the seeds of the search, given the study's seeds."""
        return seeds[: self.seeds] if isinstance(self.seeds, int) else self.seeds

    def other(self, values: Mapping[str, str]) -> dict[str, str] | None:
        """Return the configuration that ``also`` pairs with the given configuration, or None."""
        for axis, label in values.items():
            if label in self.also:
                return {**values, axis: self.also[label]}
        return None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A job that starts from models of a study's earlier jobs, such as fine-tuning."""

    name: str  # the label in the column "stage" of the tables
    job: str
    settings: Json = field(default_factory=dict)
    # the earlier job that trained each input model, by the setting that takes the model
    inputs: Mapping[str, str] = field(default_factory=dict)
    # the labels of the only configuration that runs this job (default: all configurations run the job). All
    # configurations then use the resulting model, such as a shared reward model
    of: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[Json, ...] = ()  # the configurations that skip this job and all jobs that need this job's model
    measures: tuple[str, ...] = ()  # the training records to keep, as "records/NAME"
    folder: Path = Path()  # the folder of the study's file. Paths that begin with "./" are relative to this folder

    @property
    def record(self) -> TrialJob:
        return TRIAL_JOBS[self.job]

    def trial(self, seed: int) -> Settings:
        """Return the settings of this job without input models. Raises UserError for an invalid setting."""
        settings = dict(self.settings)
        for name in self.record.files:
            if str(settings.get(name, "")).startswith("./"):
                settings[name] = str(self.folder / str(settings[name])[2:])
        return self.record.settings_class().from_dict({**settings, **({"seed": seed} if self.record.seeded else {})})

    def refuse_missing(self) -> None:
        """Raise UserError if an input file is missing, before Lamina runs the earlier jobs."""
        settings = self.trial(seed=0).to_dict()
        for name in self.record.files:
            for part in str(settings[name] or "").split(",") if name in SOURCES else ():
                try:
                    existing_file(name, part.strip())
                except UserError as error:
                    raise UserError(f"then: {self.name}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A study at one scale: cpu, gpu or paper."""

    name: str
    job: str = "pretrain"  # the first job's name, such as "pretrain"
    settings: Json = field(default_factory=dict)  # the settings that all runs share
    # the compared settings. Each axis maps labels to settings
    axes: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    rates: tuple[float, ...] = ()  # the learning rates to compare, or () if the study does not compare learning rates
    tuning: Tuning | None = None  # the search for the best learning rates, or None
    seeds: tuple[int, ...] = (0,)
    # the names of probes and training records, by time: "init", "end" or "records"
    measures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: tuple[Json, ...] = ()  # the combinations of labels that Lamina does not run
    stages: tuple[Stage, ...] = ()  # the jobs that start from the trained models
    needs: str = ""  # the reason why this scale cannot decide the claims, or ""
    # how often the claims have been judged, each time with more seeds. Lamina multiplies the corrected p values by this
    # number
    looks: int = 1
    folder: Path = Path()  # the folder of the study's file. Paths that begin with "./" are relative to this folder

    @property
    def record(self) -> TrialJob:
        return TRIAL_JOBS[self.job]

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return () if self.tuning is None else self.tuning.sweep(self.seeds)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The table columns that identify a configuration and a job."""
        return (*self.axes, *((STAGE,) if self.stages else ()))

    @property
    def all_measures(self) -> Mapping[str, tuple[str, ...]]:
        """The names of probes and training records of all jobs, by time: "init", "end" or "records"."""
        records = [each.partition("/")[2] for stage in self.stages for each in stage.measures]
        kept = dict.fromkeys([*self.measures.get("records", ()), *records])
        return {**self.measures, "records": tuple(kept)} if kept else self.measures


@dataclass(frozen=True, kw_only=True)
class StudyDefinition:
    """A study at up to three scales: cpu, gpu and paper."""

    name: str  # the name of the study and of its main claim
    paper: str  # the paper that makes the claim: one of ``PAPERS``
    source: str  # the table, figure or equation in the paper
    title: str
    scales: Mapping[str, Scale]
    file: Path  # the YAML file. A Python file with the same name defines the claims
    figures: tuple[Json, ...] = ()

    @property
    def claims_file(self) -> Path:
        return self.file.with_suffix(".py")

    def scale(self, name: str) -> Scale:
        """Return the study at one scale. Raises UserError if the study has no such scale."""
        if name not in self.scales:
            raise unknown("scale", name, self.scales, f"study {self.name}")
        return self.scales[name]


class _Entries:
    """A mapping in a study's YAML file. The methods raise UserError for an invalid field."""

    def __init__(self, where: str, data: object, allowed: Sequence[str], what: str) -> None:
        if not isinstance(data, Mapping):
            raise UserError(f"{where}: {data!r} does not fit. Give a mapping{what}.")
        self.where, self.data = where, data
        self.among("field", data, allowed)

    def among(self, what: str, names: Iterable[object], allowed: Iterable[str], at: str = "") -> None:
        listed = tuple(allowed)
        for name in names:
            if name not in listed:
                raise unknown(what, str(name), listed, f"{self.where}{f': {at}' if at else ''}")

    def refused(self, key: str, value: object, allowed: str) -> UserError:
        return UserError(f"{self.where}: {key}: {value!r} does not fit. Give {allowed}.")

    def mapping(self, key: str) -> Mapping[str, object]:
        if not isinstance(value := self.data.get(key, {}), Mapping):
            raise self.refused(key, value, "a mapping")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        if not isinstance(value := self.data.get(key, default), str):
            raise self.refused(key, value, "a text")
        return value

    def mappings(self, key: str) -> tuple[Json, ...]:
        value = self.data.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
            raise self.refused(key, value, "a list of mappings")
        return tuple(dict(entry) for entry in value)

    def whole(self, key: str, default: int, low: int) -> int:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refused(key, value, f"a whole number of at least {low}")
        return value

    def seeds(self, key: str, given: object) -> tuple[int, ...]:
        """Convert a list of seeds, or a number n for the seeds 0 to n - 1."""
        if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_SEEDS:
            return tuple(range(given))
        if isinstance(given, Sequence) and not isinstance(given, str) and given:
            seeds = tuple(seed_number("seed", seed) for seed in given)
            if len(set(seeds)) == len(seeds) <= MOST_SEEDS:
                return seeds
        raise self.refused(key, given, f"the number of seeds, at most {MOST_SEEDS}, or a list of different seeds")

    def skip(self, axes: Axes) -> tuple[Json, ...]:
        """Read the combinations of labels to leave out."""
        patterns = self.mappings("skip")
        for axis, given in (item for pattern in patterns for item in pattern.items()):
            if axis not in axes:
                raise UserError(f"{self.where}: skip: {axis!r} is not an axis (allowed: {', '.join(axes)})")
            labels = [str(label) for label in (given if isinstance(given, list) else [given])]
            if not any(label in axes[axis] for label in labels):
                self.among("label", [", ".join(labels)], axes[axis], f"skip: {axis}")
        return patterns


def read_study(study: str | Path) -> StudyDefinition:
    """Read a study, given a name or the path of a YAML file. Raises UserError if the file is invalid."""
    path = find(str(study))
    entries = _Entries(path.name, read_mapping(path), _STUDY, "")
    name = entries.text("study")
    if name != path.stem:
        raise entries.refused("study", name, f"{path.stem!r}, the file's own name")
    paper = entries.text("paper", default="field")
    entries.among("paper", [paper], PAPERS)
    scales = entries.data.get("scales")
    if not isinstance(scales, Mapping) or not scales:
        raise UserError(f"{path.name}: scales: none is given. Give a mapping from {', '.join(SCALES)}.")
    entries.among("scale", scales, SCALES)
    return StudyDefinition(
        name=name,
        paper=paper,
        source=entries.text("source", default=""),
        title=entries.text("title", default=name),
        scales={key: _read_scale(f"{path.name}: {key}", key, value, path.parent) for key, value in scales.items()},
        file=path,
        figures=entries.mappings("figures"),
    )


def _read_scale(where: str, name: str, data: object, folder: Path) -> Scale:
    entries = _Entries(where, data, _SCALE, " with base, settings, axes, ...")
    entries.mappings("figures")
    job = entries.text("job", default="pretrain")
    entries.among("job", [job], (each.name for each in TRIAL_JOBS.values() if not each.inputs))
    axes = dict(entries.mapping("axes"))
    rates, tuning = _read_rates(entries, axes.pop("learning_rate", None))
    seeds = entries.seeds("seed", axes.pop("seed", 1))
    scale_settings, base = entries.mapping("settings"), _base(entries, entries.data.get("base"), folder)
    points = {axis: _points(entries, axis, values, TRIAL_JOBS[job]) for axis, values in axes.items()}
    tuned_with: Json = {} if tuning is None else tuning.settings
    if tuning is not None:
        _check_also(entries, tuning, points)
        entries.among("setting", tuned_with, TRIAL_JOBS[job].settings_class().names(), "learning_rate: settings")
    decided = {**ENGINE, "seed": "an axis 'seed'"}
    if rates or tuning:
        decided["learning_rate"] = "only the axis 'learning_rate'"
    given = [("settings", scale_settings), ("learning_rate: settings", tuned_with)]
    for where_in_file, settings in [*given, *((f"{a}: {p}", points[a][p]) for a in points for p in points[a])]:
        for setting in settings:
            if setting in decided:
                where_in_file = f"{where}: {where_in_file}: {setting}"
                raise UserError(f"{where_in_file}: the study or its engine sets this value. Use {decided[setting]}.")
    scale = Scale(
        name=name,
        job=job,
        settings={**base, **scale_settings},
        axes=points,
        rates=rates,
        tuning=tuning,
        seeds=seeds,
        measures=_read_measures(entries),
        skip=entries.skip(points),
        stages=_read_stages(entries, job, points, folder),
        needs=entries.text("needs", default=""),
        looks=entries.whole("looks", 1, 1),
        folder=folder,
    )
    if tuning is not None and isinstance(tuning.seeds, int) and tuning.seeds > len(seeds):
        raise entries.refused("learning_rate: seeds", tuning.seeds, f"at most {len(seeds)}, the number of seeds")
    if tuned_with and not isinstance(tuning.seeds if tuning else None, tuple):
        raise entries.refused("learning_rate: settings", tuned_with, "these settings only with a list of tuning seeds")
    check_seeds(f"{where}: ", tuning, seeds)
    return scale


def _base(entries: _Entries, name: object, folder: Path) -> Json:
    if name is None:
        return {}
    bases_file = folder / BASES
    file = bases_file if bases_file.is_file() else catalog_folder() / BASES
    bases = _bases(file, file.stat().st_mtime_ns if file.is_file() else 0)
    entries.among("base", [name], bases)
    settings = dict(bases[str(name)])
    return {**_base(entries, settings.pop("base", None), folder), **settings}


@cache
def _bases(file: Path, changed: int) -> Json:
    """Read the settings that several studies share. A new ``changed`` (the file's time) renews the cache."""
    return read_mapping(file)


def _read_rates(entries: _Entries, given: object) -> tuple[tuple[float, ...], Tuning | None]:
    """Read the learning rates, or the description of a search for learning rates."""
    if given is None or not isinstance(given, Mapping):
        return () if given is None else _rates(entries, given), None
    allowed = ("tune", "seeds", "rule", "widen", "also", "settings")
    search = _Entries(f"{entries.where}: learning_rate", given, allowed, "")
    seeds, rule = given.get("seeds", 1), given.get("rule", "best")
    search.among("rule", [rule], get_args(Rule))
    return (), Tuning(
        rates=_rates(entries, given.get("tune")),
        seeds=search.whole("seeds", 1, 1) if isinstance(seeds, int) else search.seeds("seeds", seeds),
        rule=cast(Rule, rule),
        widen=search.whole("widen", WIDENINGS, 0),
        also={str(label): str(other) for label, other in search.mapping("also").items()},
        settings=dict(search.mapping("settings")),
    )


def _rates(entries: _Entries, values: object) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise entries.refused(
            "learning_rate", values, "a list of learning rates, or the field tune with a list of learning rates"
        )
    rates = []
    for value in values:
        try:
            rate = float(value) if isinstance(value, str) else value  # YAML reads 1e-3 as a text
        except ValueError:
            rate = value
        if not is_finite(rate) or rate <= 0:
            raise entries.refused("learning_rate", value, "numbers above 0")
        rates.append(float(rate))
    if len(set(rates)) < len(rates):
        raise UserError(f"{entries.where}: learning_rate: {values!r} contains a value twice. Give each value once.")
    return tuple(rates)


def check_seeds(where: str, tuning: Tuning | None, seeds: tuple[int, ...]) -> None:
    """Raise UserError if the search for learning rates lists seeds of the study, or has too few seeds."""
    if tuning is None:
        return
    if isinstance(tuning.seeds, tuple) and (both := [seed for seed in tuning.seeds if seed in seeds]):
        raise UserError(f"{where}seed {both[0]} tunes the learning rates. Give seeds outside {[*tuning.seeds]}.")
    if tuning.rule == "one-se" and len(tuning.sweep(seeds)) < 2:
        raise UserError(
            f"{where}learning_rate: rule: 'one-se' needs at least two tuning seeds. Add seeds, or set rule to best."
        )


def _check_also(entries: _Entries, tuning: Tuning, axes: Axes) -> None:
    """Raise UserError unless each pair in "also" consists of two different labels of the same axis."""
    every = {name: labels for labels in reversed([*axes.values()]) for name in labels}
    for label, other in tuning.also.items():
        entries.among("label", [label], every, "learning_rate: also")
        rest = [name for name in every[label] if name != label]
        entries.among("label", [other], rest, f"learning_rate: also: {label}")


def _points(entries: _Entries, axis: str, values: object, job: TrialJob) -> dict[str, Json]:
    """Read the values of an axis: a list of values, or a mapping from labels to settings."""
    names = job.settings_class().names()
    if axis in TAKEN and axis not in names:
        where_in_file = f"{entries.where}: {axis}"
        raise UserError(f"{where_in_file}: Lamina's tables already have this column. Choose another name.")
    if isinstance(values, Mapping) and values:
        for label, settings in values.items():
            if not isinstance(settings, Mapping):
                raise entries.refused(f"{axis}: {label}", settings, "a mapping of settings")
            entries.among("setting", settings, names, f"{axis}: {label}")
        return {str(label): dict(settings) for label, settings in values.items()}
    entries.among("axis", [axis], names)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise entries.refused(axis, values, "a list of values")
    return {str(value): {axis: value} for value in values}


def _read_measures(entries: _Entries) -> dict[str, tuple[str, ...]]:
    measures = {}
    given = _Entries(f"{entries.where}: measures", entries.mapping("measures"), TIMES, "")
    for time, listed in given.data.items():
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise given.refused(time, listed, "a list")
        if time == "records":
            entries.among("record", listed, RECORDS)
        for name in listed if time != "records" else ():
            try:
                check_probe(str(name))
            except UserError as error:
                raise UserError(f"{given.where}: {time}: {error}") from None
        measures[time] = tuple(str(name) for name in listed)
    return measures


def _read_stages(scale: _Entries, first: str, axes: Axes, folder: Path) -> tuple[Stage, ...]:
    """Read the jobs that start from trained models. ``first`` is the name of the first job."""
    stages: dict[str, Stage] = {}
    listed = scale.mapping("then")
    if listed and STAGE in axes:
        raise UserError(f"{scale.where}: axes: Lamina adds an axis {STAGE!r} for the jobs. Rename your axis.")
    for name, entry in listed.items():
        if name == first or not isinstance(entry, Mapping):
            allowed = f"a name other than {first!r}, and a mapping with job, settings"
            raise UserError(f"{scale.where}: then: {name}: {entry!r} does not fit. Give {allowed}.")
        entries = _Entries(f"{scale.where}: then: {name}", entry, _STAGE, "")
        stages[name] = _read_stage(entries, str(name), (first, *stages), axes, folder)
    return tuple(stages.values())


def _read_stage(entries: _Entries, name: str, earlier: Sequence[str], axes: Axes, folder: Path) -> Stage:
    job = entries.text("job", default=name)
    entries.among("job", [job], (each.name for each in TRIAL_JOBS.values() if each.inputs))
    settings, record = dict(entries.mapping("settings")), TRIAL_JOBS[job].settings_class()
    decided = {"seed", *ENGINE, *TRIAL_JOBS[job].inputs, *(record.free() - {*TRIAL_JOBS[job].files})}
    entries.among("setting", settings, [each for each in record.names() if each not in decided])
    of = {str(axis): str(label) for axis, label in entries.mapping("of").items()}
    for axis, label in of.items():
        if axis not in axes or label not in axes[axis]:
            where_in_file = f"{entries.where}: of: {axis}: {label!r}"
            raise UserError(f"{where_in_file} is not a value of this axis. Give values of {', '.join(axes)}.")
    records = entries.data.get("records", ())
    records = records if isinstance(records, Sequence) else (records,)
    entries.among("record", records, RECORDS)
    given, inputs_taken = entries.data.get("from", earlier[0]), TRIAL_JOBS[job].inputs
    inputs = dict(given) if isinstance(given, Mapping) else {inputs_taken[0]: given}  # one name means the main input
    entries.among("setting", inputs, inputs_taken, "from")
    entries.among("stage", inputs.values(), earlier, "from")
    if inputs_taken[0] not in inputs:
        raise UserError(
            f"{entries.where}: from: {given!r} lacks {inputs_taken[0]}. Name the stage that trains this model."
        )
    stage = Stage(
        name=name,
        job=job,
        settings=settings,
        inputs={str(setting): str(source) for setting, source in inputs.items()},
        of=of,
        skip=entries.skip(axes),
        measures=tuple(f"records/{record}" for record in records),
        folder=folder,
    )
    stage.trial(seed=0)
    return stage
