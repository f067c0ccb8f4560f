"""Describe a study's runs. A run's key is a hash of everything that determines the run's results.

Two runs with the same key have the same results, bit-identical on the same machine. Several studies can therefore share
a run, and a changed run never replaces an old run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from lamina.core.backbone_presets import PRESETS
from lamina.core.json_types import Json
from lamina.data.corpus import Corpus
from lamina.errors import UserError
from lamina.evaluation.generated import NAMES, version
from lamina.evaluation.task_sets import GENERATED
from lamina.jobs.manifest import files_in, model_folder, sha256
from lamina.jobs.names import MANIFEST
from lamina.jobs.settings import Settings
from lamina.lab.papers.trials.jobs import TRIAL_JOBS, TrialJob
from lamina.lab.posttraining.settings import MemorySettings
from lamina.lab.vision.settings import ImageSettings
from lamina.placements import resolve
from lamina.training.setting_groups import ObjectiveSettings, PackingSettings, PretrainOptimizerSettings
from lamina.training.settings import BranchSettings

NUMERICS = 1
"""The version of the training code. Increase this number if your change alters the losses of the same settings.

tests/lab/papers/test_numerics.py trains a few small models, and fails if their losses have changed.
"""

# settings that matter only if a run may roll back
OF_A_ROLLBACK = frozenset(("rollback_factor", "rollback_skip", "save_steps", "keep"))
# settings that may name a folder, with the files that do not count
_WEIGHTS = ("*.safetensors", MANIFEST)
PLACES = {"backbone": (*_WEIGHTS, "*token*", "README.md"), "tokenizer": _WEIGHTS, "from_model": ()}
# settings that count by their meaning and not by their spelling
SPELLED = ("placement", "num_layers", "init", "corpus", "eval_corpus")
_NAMES = ("placement", "options", "initialization")  # the fields of a plan that are only names
# Newer settings, with the values that change nothing. A key leaves out these values, so that older runs keep their
# keys.
_YOUNGER_GROUPS = (
    *(BranchSettings, ObjectiveSettings, ImageSettings, PretrainOptimizerSettings, MemorySettings),
    PackingSettings,
)
YOUNGER: Json = {
    "eval_corpus": None,
    "eval_tasks": None,
    "eval_task_limit": 100,
    "trl": {},
    "group_by_length": False,
    "depth_scaling": "none",
    "base_depth": None,
    "reward_weights": None,
    "system": None,
    "generation": {},
    "reward_timeout": 0.0,
    **{name: group.default(name) for group in _YOUNGER_GROUPS for name in group.names()},
}


def identity(job: str, settings: Settings) -> Json:
    """Return everything that determines a run's results. Raises UserError for an unreadable placement or corpus."""
    values = settings.to_dict()
    placement, layers = str(values.pop("placement")), values.pop("num_layers", None)
    plan, recommended = _plan(placement, layers or _depth(str(values["backbone"])))
    if values.get("init") == "recommended":
        values["init"] = recommended
    kept = _deciding(values, settings.free(), ("corpus",))
    field, second = str(values.get("text_field", "text")), kept.pop("eval_corpus", None)
    return {
        "job": job,
        "numerics": NUMERICS,
        "settings": kept,
        "plan": plan,
        "text": _text(str(values["corpus"]), field),
        **({} if second is None else {"eval_text": _text(str(second), field)}),
        **_places(kept),
    }


def chained(job: TrialJob, settings: Settings, inputs: Mapping[str, str]) -> Json:
    """Return everything that determines the results of a run that starts from other runs' models (keys ``inputs``)."""
    values, data = settings.to_dict(), {}
    for name in job.files:
        if (value := values.pop(name)) not in (None, ""):
            data[name] = ",".join(_content(part.strip()) for part in str(value).split(","))
    field = str(values.get("text_field", "text"))
    texts = {name: _text(str(values[name]), field) for name in ("corpus", "eval_corpus") if values.get(name)}
    kept = _deciding(values, settings.free(), (*job.inputs, *texts))
    if job.name == "sft":  # the older name of TRL's completion_only_loss, in the keys of all older trials
        kept["loss_on"] = "all" if kept.get("trl") == {"completion_only_loss": False} else "answer"
        kept = {name: value for name, value in kept.items() if name != "trl" or kept["loss_on"] == "answer"}
    identity: Json = {"job": job.name, "numerics": NUMERICS, "settings": kept, "inputs": dict(inputs), "data": data}
    return {**identity, **({"texts": texts} if texts else {}), **_places(kept)}


def key(identity: Json) -> str:
    """Hash everything that determines a run's results. Returns 16 hexadecimal digits."""
    return _hash(identity)[:16]


def read_again() -> None:
    """Forget cached texts and placement files, because they may have changed."""
    for cached in (_plan, _text, _depth, _files):
        cached.cache_clear()


def _deciding(values: Json, free: frozenset[str], others: Iterable[str]) -> Json:
    """Return the settings that affect a run's results, except the settings in ``others``."""
    left_out = {*others, *(free - OF_A_ROLLBACK if values.get("rollback") else free)}
    return {
        name: value
        for name, value in values.items()
        if name not in left_out and not (name in YOUNGER and value == YOUNGER[name])
    }


def _places(settings: Json) -> Json:
    """Return a hash of each folder that a setting names, by setting."""
    places = {
        name: _files(str(path), ignored)
        for name, ignored in PLACES.items()
        if (value := settings.get(name)) and (path := Path(str(value)).expanduser()).is_dir() and value not in PRESETS
    }
    return {"places": places} if places else {}


@lru_cache(maxsize=64)
def _files(folder: str, ignored: tuple[str, ...]) -> str:
    root = model_folder(folder)
    names = [name for name in files_in(root) if not any(fnmatch(name, pattern) for pattern in ignored)]
    return _hash([[name, sha256(root / name)] for name in names])


@lru_cache(maxsize=1024)
def _plan(placement: str, num_layers: int) -> tuple[str, str]:
    """Return a hash of a norm placement's computations, and the name of the recommended initializer."""
    plan = resolve(placement, num_layers)
    unnamed = {name: value for name, value in _changed(plan).items() if name not in _NAMES}
    return _hash(unnamed), plan.initialization or "normal"


def _changed(value: object) -> Json:
    """Return the fields that differ from their defaults. A new field then does not change the keys of older runs."""
    assert is_dataclass(value)
    changed = {}
    for entry in fields(value):
        held = getattr(value, entry.name)
        if held == (entry.default if entry.default_factory is MISSING else entry.default_factory()):
            continue
        if isinstance(held, tuple):
            changed[entry.name] = [_changed(file) if is_dataclass(file) else file for file in held]
        else:
            changed[entry.name] = _changed(held) if is_dataclass(held) else held
    return changed


def _content(source: str) -> str:
    """Return a file's hash, or the name and version of generated data. Return any other text unchanged."""
    file, _, rest = source.rpartition(":") if ".py:" in source else (source, "", "")
    if (path := Path(file).expanduser()).is_file():
        return f"{sha256(path)} {rest}".strip()
    return f"{source} {version()}" if source.partition(":")[0] in (GENERATED, *NAMES) else source


def _hash(data: Json | list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=64)
def _text(corpus: str, text_field: str) -> str:
    """Return the hash of each part of a corpus, and each part's proportion."""
    parts = Corpus.parse(corpus, text_field).parts
    hashes = "+".join(part.corpus.fingerprint() for part in parts)
    return hashes if len(parts) == 1 else f"{hashes} {':'.join(str(part.share) for part in parts)}"


@lru_cache(maxsize=64)
def _depth(backbone: str) -> int:
    from lamina.modeling.backbones import resolve_backbone  # imports transformers

    return int(resolve_backbone(backbone).num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class StudyTrial:
    """A run of a study."""

    job: str
    values: Mapping[str, str]  # the labels of the compared settings
    settings: Settings  # all settings except the folder
    measures: tuple[str, ...]  # the names of the run's measurements, as "TIME/NAME"
    identity: Json  # everything that determines the run's results
    key: str  # a hash of the identity
    # the runs that train this run's input models, by the setting that takes the model
    inputs: Mapping[str, StudyTrial] = field(default_factory=dict)
    root: StudyTrial | None = None  # the pretraining run from which this run descends, or None for a pretraining run

    @property
    def first(self) -> StudyTrial:
        return self if self.root is None else self.root

    @property
    def placement(self) -> str:
        return str(getattr(self.first.settings, "placement", ""))

    @property
    def learning_rate(self) -> float | None:
        """The peak learning rate of the pretraining run, or None."""
        return getattr(self.first.settings, "learning_rate", None)

    @property
    def seed(self) -> int:
        return int(getattr(self.first.settings, "seed", 0))

    @property
    def name(self) -> str:
        """A short name for progress lines."""
        words = [*self.values.values(), *([] if self.learning_rate is None else [f"lr {self.learning_rate:g}"])]
        return ", ".join([*words, f"seed {self.seed}"])


def may_be(trial: StudyTrial, placement: str) -> bool:
    """Return whether a run may have this placement. The result is True if Lamina cannot read the placement."""
    try:
        settings = replace(trial.settings, placement=placement)
        return identity(trial.job, settings)["plan"] == trial.identity["plan"]
    except (UserError, TypeError):  # the placement is a file of another machine
        return True


def make_trial(job: str, values: Mapping[str, str], settings: Settings, measures: tuple[str, ...]) -> StudyTrial:
    decided = identity(job, settings)
    return StudyTrial(job=job, values=values, settings=settings, measures=measures, identity=decided, key=key(decided))


def make_chained(
    job: str,
    values: Mapping[str, str],
    settings: Settings,
    measures: tuple[str, ...],
    *,
    inputs: Mapping[str, StudyTrial],
    root: StudyTrial,
) -> StudyTrial:
    """Create a run that starts from other runs' models. Raises UserError if Lamina cannot read the data."""
    identity_here = chained(TRIAL_JOBS[job], settings, {name: trial.key for name, trial in inputs.items()})
    made = StudyTrial(
        job=job, values=values, settings=settings, measures=measures, identity=identity_here, key=key(identity_here)
    )
    return replace(made, inputs=inputs, root=root)
