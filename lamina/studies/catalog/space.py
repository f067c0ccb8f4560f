"""The space of a search: per setting, a range or a list; read from a study's YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lamina.core.json_types import Json
from lamina.core.values import is_finite
from lamina.errors import UserError, unknown

if TYPE_CHECKING:
    import optuna

Sampler = Literal["tpe", "random"]
SAMPLERS = ("tpe", "random")
_FIELDS = {"trials", "sampler", "space", "rungs", "keep", "race", "seed"}
_RANGE = {"low", "high", "log"}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``low`` to ``high``; ``log``: evenly over their logarithm."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True, kw_only=True)
class Search:
    """How a scale's settings are searched.

    Attributes:
        space: per setting, its range or its values.
        trials: how many candidates are proposed.
        sampler: tpe (by what the earlier ones gave) or random.
        rungs: steps at which a candidate pauses and is compared; the best go on from their checkpoints.
        keep: one of how many candidates goes on from a rung.
        race: how many candidates run with all seeds; one that is worse than the best on the same seeds is dropped.
        seed: of the sampler.
    """

    space: Mapping[str, Range | tuple[object, ...]]
    trials: int
    sampler: str = "tpe"
    rungs: tuple[int, ...] = ()
    keep: int = 3
    race: int = 4
    seed: int = 0

    def propose(self, trial: optuna.Trial) -> Json:
        """The settings that Optuna proposes for a trial."""
        settings: Json = {}
        for name, values in self.space.items():
            if isinstance(values, tuple):
                settings[name] = values[trial.suggest_categorical(name, list(range(len(values))))]
            elif values.whole:
                settings[name] = trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
            else:
                settings[name] = float(f"{trial.suggest_float(name, values.low, values.high, log=values.log):.4g}")
        return settings


def read_search(where: str, data: object, names: Sequence[str], steps: int | None) -> Search | None:
    """The search of a scale; None if it has none. Raises UserError that names the field."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise UserError(f"{where}search: {data!r} (allowed: a mapping with space, trials, ...)")
    for key in data:
        if key not in _FIELDS:
            raise unknown(f"field in {where}search", str(key), _FIELDS)
    space = data.get("space")
    if not isinstance(space, Mapping) or not space:
        raise UserError(f"{where}search: space: {space!r} (allowed: a mapping from settings to a range or a list)")
    for name in space:
        if name not in names:
            raise unknown(f"setting in {where}search: space", str(name), names)
    sampler = data.get("sampler", "tpe")
    if sampler not in SAMPLERS:
        raise unknown(f"sampler in {where}search", str(sampler), SAMPLERS)
    counts = {name: _count(where, name, data.get(name, default)) for name, default in _COUNTS.items()}
    rungs = tuple(_count(where, "rungs", rung) for rung in data.get("rungs", ()))
    if list(rungs) != sorted(set(rungs)) or (steps is not None and rungs and rungs[-1] >= steps):
        raise UserError(f"{where}search: rungs: {list(rungs)} (allowed: rising steps below the run's {steps})")
    return Search(
        space={str(name): _values(where, str(name), values) for name, values in space.items()},
        sampler=sampler,
        rungs=rungs,
        **counts,
    )


_COUNTS = {"trials": 20, "keep": 3, "race": 4, "seed": 0}


def _count(where: str, name: str, value: object) -> int:
    low = {"seed": 0, "keep": 2}.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{where}search: {name}: {value!r} (allowed: a whole number of at least {low})")
    return value


def _values(where: str, name: str, values: object) -> Range | tuple[object, ...]:
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        return tuple(values)
    if not isinstance(values, Mapping) or not {"low", "high"} <= set(values) <= _RANGE:
        raise UserError(f"{where}search: {name}: {values!r} (allowed: a list, or low: and high:, and log: true)")
    low, high = (_number(values[end]) for end in ("low", "high"))
    log = values.get("log", False)
    if low is None or high is None or low >= high or (log and low <= 0):
        raise UserError(f"{where}search: {name}: {dict(values)!r} (allowed: numbers with low < high; with log above 0)")
    return Range(low=low, high=high, log=bool(log))


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return value if is_finite(value) and not isinstance(value, bool) else None
