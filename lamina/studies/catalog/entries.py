"""Reads the entries of a study's YAML. Every error names the place and the nearest allowed name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lamina.errors import UserError, unknown


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
