"""A study as data, read from YAML and checked; and where the catalog of studies is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError, unknown
from lamina.jobs import columns
from lamina.papers.catalog.scale import (
    ENGINE,
    RECORDS,
    STAGE,
    Stage,
    Tuning,
    check_also,
    check_seeds,
    known,
    mapping,
    mappings,
    read_rates,
    read_seeds,
    read_skip,
    read_stages,
    text,
    whole,
)
from lamina.papers.trials.jobs import JOBS, TrialJob
from lamina.probes.engine.registry import check_probe

BASES = "bases.yaml"
_RECORDS = "lamina_records"


def catalog_folder() -> Path:
    """Return the folder of the studies that come with Lamina: the repository's, or the package's."""
    repository = Path(__file__).parents[3] / "studies"
    return repository if (repository / BASES).is_file() else Path(__file__).parents[1] / "studies"


def records_folder() -> Path:
    """Return the folder of their records: the repository's, or the one that lamina[papers] installs.

    It does not exist without either: then nothing is recorded.
    """
    spec = find_spec(_RECORDS)
    installed = list(spec.submodule_search_locations or ()) if spec else []
    folder = catalog_folder() / "records"
    return Path(installed[0]) if installed and not folder.is_dir() else folder


def names() -> list[str]:
    """The names of all studies of the catalog."""
    return sorted(path.stem for path in catalog_folder().glob("*.yaml") if path.name != BASES)


def find(study: str) -> Path:
    """Find a study's file by its name in the catalog, or by the path of a user's own. Raises UserError."""
    path = Path(study)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"study: {study!r} is not a file (allowed: a YAML file, or a name of `lamina study list`)")
        return path.resolve()
    if study not in (known := names()):
        raise unknown("study", study, known)
    return catalog_folder() / f"{study}.yaml"


PAPERS = ("fusenorm", "keel", "mix_ln", "peri_ln", "field")
SCALES = ("cpu", "gpu", "paper")
TIMES = ("init", "end", "records")
TAKEN = frozenset(
    (
        *(*columns.names(), "key", "tuned", "at_edge", STAGE, "candidate"),
        *("metric", "value", "layer", "sublayer", "role", "index", "step", "loss"),
        *("label", "panel", "line", "rest", "place", "y", "mean", "std", "low", "high", "trained", "trials", "ended"),
    )
)
"""The columns of results.csv, of what is measured, and of the page's tables: an axis can't have their names."""
_STUDY = {"study", "paper", "source", "title", "question", "scales", "figure", "figures", "notes"}
_SCALE = {
    "base",
    "settings",
    "axes",
    "measures",
    "job",
    "skip",
    "needs",
    "looks",
    "then",
    "notes",
    "figure",
    "figures",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One scale of a study.

    Attributes:
        name: cpu, gpu or paper.
        job: what a trial is: a name in ``JOBS``.
        settings: those that all trials share.
        axes: per axis, its values by label; a value is the settings that it stands for.
        rates: the learning rates of a sweep; empty if the settings or the arms say the rate.
        tuning: the search for each arm's rate, if there is one.
        seeds: of the trials.
        measures: per time (init, end, records), the probes or records.
        skip: combinations of axis values that are left out.
        stages: the jobs that follow, on the models that these trials leave.
        needs: why this scale cannot decide the claims; empty if it can.
        looks: how often its verdicts have been read, each time with more seeds; multiplies the corrected p values.
        folder: of the study's file; placements that begin with ``./`` are relative to it.
    """

    name: str
    job: str = "pretrain"
    settings: Json = field(default_factory=dict)
    axes: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    tuning: Tuning | None = None
    seeds: tuple[int, ...] = (0,)
    measures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: tuple[Json, ...] = ()
    stages: tuple[Stage, ...] = ()
    needs: str = ""
    looks: int = 1
    folder: Path = Path()

    @property
    def record(self) -> TrialJob:
        """The job of this scale's trials."""
        return JOBS[self.job]

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds that choose each arm's rate; none if no rate is tuned."""
        return () if self.tuning is None else self.tuning.sweep(self.seeds)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of a row besides learning rate and seed."""
        return (*self.axes, *((STAGE,) if self.stages else ()))

    @property
    def all_measures(self) -> Mapping[str, tuple[str, ...]]:
        """The measures by time, with the records of the stages."""
        records = [each.partition("/")[2] for stage in self.stages for each in stage.measures]
        kept = dict.fromkeys([*self.measures.get("records", ()), *records])
        return {**self.measures, "records": tuple(kept)} if kept else self.measures


@dataclass(frozen=True, kw_only=True)
class StudyDefinition:
    """A study: one question, at up to three scales.

    Attributes:
        name: also the id of its main claim.
        paper: whose claim it is; one of ``PAPERS``.
        source: the table, figure or equation.
        title: what is compared.
        scales: by name.
        file: the YAML file; the claims stand in the Python file of the same name beside it.
        figures: how its figures are drawn, as written.
    """

    name: str
    paper: str
    source: str
    title: str
    scales: Mapping[str, Scale]
    file: Path
    figures: tuple[Json, ...] = ()

    @property
    def claims_file(self) -> Path:
        """The Python file with the claims."""
        return self.file.with_suffix(".py")

    def scale(self, name: str) -> Scale:
        """A scale by its name. Raises UserError for one that the study does not have."""
        if name not in self.scales:
            raise unknown(f"scale of {self.name}", name, self.scales)
        return self.scales[name]


def read_study(study: str | Path) -> StudyDefinition:
    """Read a study by its name in the catalog or by its file.

    Raises UserError that names the file, the field and the nearest allowed name.
    """
    path = find(str(study))
    data = read_mapping(path)
    where = f"{path.name}: "
    known(where, data, _STUDY)
    name = text(where, data, "study")
    if name != path.stem:
        raise UserError(f"{where}study: {name!r} (allowed: {path.stem!r}, the file's own name)")
    paper = text(where, data, "paper", default="field")
    if paper not in PAPERS:
        raise unknown(f"paper in {path.name}", paper, PAPERS)
    scales = data.get("scales")
    if not isinstance(scales, Mapping) or not scales:
        raise UserError(f"{where}scales: none given (allowed: a mapping from {', '.join(SCALES)})")
    for scale in scales:
        if scale not in SCALES:
            raise unknown(f"scale in {path.name}", str(scale), SCALES)
    return StudyDefinition(
        name=name,
        paper=paper,
        source=text(where, data, "source", default=""),
        title=text(where, data, "title", default=name),
        scales={key: _read_scale(f"{where}{key}: ", key, value, path.parent) for key, value in scales.items()},
        file=path,
        figures=_figures(where, data),
    )


def _figures(where: str, data: Mapping[str, object]) -> tuple[Json, ...]:
    """Return the figures that a study or a scale asks for, under ``figures`` or ``figure``."""
    if "figures" in data or "figure" not in data:
        return mappings(where, data, "figures")
    return (dict(mapping(where, data, "figure")),)


def _read_scale(where: str, name: str, data: object, folder: Path) -> Scale:
    if not isinstance(data, Mapping):
        raise UserError(f"{where}{data!r} (allowed: a mapping with base, settings, axes, ...)")
    known(where, data, _SCALE)
    _figures(where, data)
    job = text(where, data, "job", default="pretrain")
    if job not in (first := [each.name for each in JOBS.values() if not each.inputs]):
        raise unknown("job", job, first)
    axes = dict(mapping(where, data, "axes"))
    rates, tuning = read_rates(where, axes.pop("learning_rate", None))
    seeds = read_seeds(f"{where}seed", axes.pop("seed", 1))
    settings = {**_base(where, data.get("base"), folder), **mapping(where, data, "settings")}
    points = {axis: _points(where, axis, values, JOBS[job]) for axis, values in axes.items()}
    check_also(where, tuning, points)
    own = {"settings": {"": mapping(where, data, "settings")}, **points}
    _refuse_said_twice(where, own, rates=bool(rates or tuning))
    scale = Scale(
        name=name,
        job=job,
        settings=settings,
        axes=points,
        rates=rates,
        tuning=tuning,
        seeds=seeds,
        measures=_measures(where, mapping(where, data, "measures")),
        skip=read_skip(where, data, points),
        stages=read_stages(where, data, job, points, folder),
        needs=text(where, data, "needs", default=""),
        looks=whole(f"{where}looks", data.get("looks", 1), 1),
        folder=folder,
    )
    if tuning is not None and isinstance(tuning.seeds, int) and tuning.seeds > len(seeds):
        raise UserError(f"{where}learning_rate: seeds: {tuning.seeds} (allowed: at most the {len(seeds)} of 'seed')")
    check_seeds(where, tuning, seeds)
    return scale


def _base(where: str, name: object, folder: Path) -> Json:
    if name is None:
        return {}
    own = folder / BASES
    file = own if own.is_file() else catalog_folder() / BASES
    bases = _bases(file, file.stat().st_mtime_ns if file.is_file() else 0)
    if not isinstance(name, str) or name not in bases:
        raise unknown(f"base in {where.strip()}", str(name), bases)
    settings = dict(bases[name])
    return {**_base(where, settings.pop("base", None), folder), **settings}


@cache
def _bases(file: Path, changed: int) -> Json:
    """A file of bases: read once for all studies until it changes."""
    return read_mapping(file)


def _points(where: str, axis: str, values: object, job: TrialJob) -> dict[str, Json]:
    """An axis's values by label: a list of a setting's values, or labels with settings."""
    names = job.settings_class().names()
    if axis in TAKEN and axis not in names:
        raise UserError(f"{where}{axis}: is a column of the study's tables already (allowed: another name)")
    if isinstance(values, Mapping) and values:
        for label, settings in values.items():
            if not isinstance(settings, Mapping):
                raise UserError(f"{where}{axis}: {label}: {settings!r} (allowed: a mapping of settings)")
            for name in settings:
                if name not in names:
                    raise unknown(f"setting in {where}{axis}: {label}", str(name), names)
        return {str(label): dict(settings) for label, settings in values.items()}
    if axis not in names:
        raise unknown(f"axis in {where.strip()}", axis, names)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"{where}{axis}: {values!r} (allowed: a list of values)")
    return {str(value): {axis: value} for value in values}


def _refuse_said_twice(where: str, axes: Mapping[str, Mapping[str, Json]], *, rates: bool) -> None:
    """Raise UserError for an axis that sets the seed, the rate of a sweep, or what the engine decides."""
    own = {**ENGINE, "seed": "an axis 'seed'", **({"learning_rate": "the axis 'learning_rate' alone"} if rates else {})}
    for axis, label, settings in ((axis, *point) for axis, points in axes.items() for point in points.items()):
        for name in settings:
            if name in own:
                place = f"{where}{axis}: {label}: {name}".replace(": : ", ": ")
                raise UserError(f"{place}: the trials say it themselves (allowed: {own[name]})")


def _check_probe(where: str, name: str) -> None:
    try:
        check_probe(name)
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _measures(where: str, given: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    known(f"{where}measures: ", given, set(TIMES))
    measures = {}
    for time, listed in given.items():
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise UserError(f"{where}measures: {time}: {listed!r} (allowed: a list)")
        for name in listed:
            if time != "records":
                _check_probe(f"{where}measures: {time}: ", str(name))
            elif name not in RECORDS:
                raise unknown(f"record in {where.strip()}", str(name), RECORDS)
        measures[time] = tuple(str(name) for name in listed)
    return measures
