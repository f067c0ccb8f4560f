"""Reads the entries of a study's YAML. Every error names the place and the nearest allowed name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lamina.core.json_types import Json
from lamina.core.values import seed_number
from lamina.errors import UserError, unknown

MOST_SEEDS = 1000
"""Each seed is a trial of every arm: a number above is a seed that was meant as one, not as how many."""


def known(where: str, data: Mapping[str, object], allowed: Iterable[str]) -> None:
    """Raise UserError for an entry that is not among the allowed ones."""
    names = tuple(allowed)
    for key in data:
        if key not in names:
            raise unknown(f"field in {where.strip().rstrip(':')}", str(key), names)


def mapping(where: str, data: Mapping[str, object], key: str) -> Mapping[str, object]:
    """An entry that is a mapping; an empty one if it is missing."""
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise UserError(f"{where}{key}: {value!r} (allowed: a mapping)")
    return value


def text(where: str, data: Mapping[str, object], key: str, default: str | None = None) -> str:
    """An entry that is a text; ``default`` if it is missing."""
    value = data.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"{where}{key}: {value!r} (allowed: a text)")
    return value


def mappings(where: str, data: Mapping[str, object], key: str) -> tuple[Json, ...]:
    """An entry that is a list of mappings; an empty one if it is missing."""
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
    """Seeds: the first so many from 0, or a list of different ones."""
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_SEEDS:
        return tuple(range(given))
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        seeds = tuple(seed_number("seed", seed) for seed in given)
        if len(set(seeds)) == len(seeds) <= MOST_SEEDS:
            return seeds
    raise UserError(f"{where}: {given!r} (allowed: how many, at most {MOST_SEEDS}, or a list of different seeds)")


def read_skip(where: str, data: Mapping[str, object], axes: Mapping[str, Mapping[str, Json]]) -> tuple[Json, ...]:
    """The patterns under ``skip``: per axis, a label or a list of labels of which the axis has at least one."""
    patterns = mappings(where, data, "skip")
    for axis, given in (item for pattern in patterns for item in pattern.items()):
        if axis not in axes:
            raise UserError(f"{where}skip: {axis!r} is no axis (allowed: {', '.join(axes)})")
        labels = [str(label) for label in (given if isinstance(given, list) else [given])]
        if not any(label in axes[axis] for label in labels):
            raise unknown(f"label in {where}skip: {axis}", ", ".join(labels), axes[axis])
    return patterns
