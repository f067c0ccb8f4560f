"""Conversion of Python objects (lists, paths, data sets) to the texts that the command line has."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lamina.core.values import PathLike, Rows
from lamina.errors import UserError

_PLACE = re.compile(r"hf:\S+|\S*/\S*|\S+\.(txt|jsonl?|parquet|gz|xz|zst)")  # what is meant as a path, not as a text


def as_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings as a run's config.yaml can hold them: texts and data sets become files of the cache.

    Raises UserError for an object that holds no text or no rows.
    """
    settings = dict(given)
    field = str(given.get("text_field", "text"))
    for name in ("corpus", "eval_corpus"):
        if name in settings:
            settings[name] = _corpus(name, settings[name], field)
    for name in ("data", "eval_data"):
        if name in settings:
            settings[name] = _examples(name, settings[name])
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}


def _corpus(name: str, value: object, field: str) -> object:
    if value is None or isinstance(value, str | os.PathLike):
        return value
    _refuse_splits(name, value)
    if isinstance(value, Rows):
        if field not in value.column_names:
            listed = ", ".join(value.column_names)
            raise UserError(f"{name}: the data set has no column {field!r} (allowed: text_field= one of {listed})")
        return _file(name, ({field: row[field]} for row in value), ({field: row[field]} for row in value))
    if not isinstance(value, Sequence) or not value or not all(isinstance(x, str | os.PathLike) for x in value):
        raise _refused(name, value, "a path, a list of paths or of texts, a datasets.Dataset")
    if all(isinstance(x, os.PathLike) or _exists(x) for x in value):
        if len(value) == 1:
            return os.fspath(value[0])
        return _file(name, _documents(value, field), _documents(value, field))
    if any(isinstance(x, os.PathLike) or _exists(x) for x in value):
        missing = next(x for x in value if not isinstance(x, os.PathLike) and not _exists(x))
        raise UserError(f"{name}: {missing[:80]!r} is no file, others in the list are (allowed: paths, or texts)")
    if all(_PLACE.fullmatch(str(x)) for x in value):
        raise UserError(f"{name}: {str(value[0])[:80]!r}: no such file (allowed: a list of paths, or of texts)")
    return _file(name, ({field: text} for text in value), ({field: text} for text in value))


def _examples(name: str, value: object) -> object:
    if value is None or isinstance(value, str | os.PathLike):
        return value
    _refuse_splits(name, value)
    if isinstance(value, Rows):
        return _file(name, iter(value), iter(value))
    if isinstance(value, Sequence) and value and all(isinstance(row, Mapping) for row in value):
        return _file(name, iter(value), iter(value))
    raise _refused(name, value, "a path, a list of rows, a datasets.Dataset")


def _refuse_splits(name: str, value: object) -> None:
    """Raise UserError for a datasets.DatasetDict, which `load_dataset(NAME)` returns."""
    if isinstance(splits := getattr(value, "column_names", None), Mapping):
        names = [str(split) for split in splits]
        allowed = f"one of them, as in data[{names[0]!r}]" if names else "a datasets.Dataset"
        raise UserError(f"{name}: a DatasetDict of {', '.join(names) or 'no splits'} (allowed: {allowed})")


def _refused(name: str, value: object, allowed: str) -> UserError:
    return UserError(f"{name}: {type(value).__name__} {str(value)[:60]!r} (allowed: {allowed})")


def _exists(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _documents(paths: Iterable[PathLike], field: str) -> Iterator[Mapping[str, object]]:
    from lamina.data.corpus import single_corpus

    for path in paths:
        for document in single_corpus(os.fspath(path), field).documents():
            yield {field: document.text}


def _file(name: str, first: Iterator[Mapping[str, object]], second: Iterator[Mapping[str, object]]) -> str:
    """Write the rows to a .jsonl file of the cache, named by their hash; both iterators give the same rows."""
    from lamina.data.cache import cache_root, is_whole, publish

    digest = hashlib.sha256()
    for line in _lines(name, first):
        digest.update(line.encode("utf-8", "surrogatepass"))
    folder = cache_root() / "given" / digest.hexdigest()[:32]

    def write(draft: Path) -> None:
        with (draft / "rows.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(_lines(name, second))

    if not is_whole(folder):
        publish(folder, write)
    return str(folder / "rows.jsonl")


def _lines(name: str, rows: Iterator[Mapping[str, object]]) -> Iterator[str]:
    for row in rows:
        try:
            yield json.dumps(dict(row)) + "\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: a row holds something that JSON can't ({error})") from None
