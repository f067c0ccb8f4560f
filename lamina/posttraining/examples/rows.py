"""The rows of a file or a data set, each with its place, and what becomes of those that can't be used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from lamina.core.values import home
from lamina.data.sources import hub_datasets
from lamina.data.sources.file_documents import NotTextError, encodable_text, inner_suffix, open_text
from lamina.errors import UserError
from lamina.posttraining.examples import generated

logger = logging.getLogger(__name__)

T = TypeVar("T")
Fields = Mapping[str, Any]
ALLOWED = f"a .jsonl or .json file, also .gz, .xz or .zst, hf:NAME[:CONFIG][@SPLIT], or {generated.ALLOWED}"


@dataclass(frozen=True, kw_only=True)
class Usable(Generic[T]):
    """The examples of a source.

    Attributes:
        items: in the order of the rows.
        skipped: how many rows were left out.
    """

    items: list[T]
    skipped: int


def read(name: str, source: str, use: Callable[[Fields], T], *, skip_bad: bool) -> Usable[T]:
    """What ``use`` makes of each row of a source.

    Args:
        name: of the setting, for the messages.
        source: a file, hf:NAME, or generated:KIND.
        use: raises ValueError with the reason why a row can't be used.
        skip_bad: whether to leave such rows out and count them.

    Raises:
        UserError: with the line's number (in a list, the row's), for a row that is not JSON or can't be used; for a
            source that can't be read or has no usable row.
    """
    items: list[T] = []
    skipped = 0
    noun = _counted(source)
    for number, row in _rows(name, source):
        try:
            if isinstance(row, ValueError):
                raise row
            items.append(use(row))
        except UserError:
            raise
        except ValueError as error:
            if not skip_bad:
                where = f"{name}: {source!r}, {noun} {number}"
                raise UserError(f"{where}: {error} (--skip-bad leaves such {noun}s out)") from None
            skipped += 1
    if skipped:
        logger.warning("%s: %s: %d of %d rows left out", name, source, skipped, skipped + len(items))
    if not items:
        raise UserError(f"{name}: {source!r} has no usable row")
    return Usable(items=items, skipped=skipped)


def _counted(source: str) -> str:
    """What a source's rows are numbered by: the rows of a list may stand on any line of the file."""
    lines = not (hub_datasets.is_hub(source) or generated.is_generated(source))
    return "line" if lines and inner_suffix(Path(source)) != ".json" else "row"


def _rows(name: str, source: str) -> Iterator[tuple[int, Fields | ValueError]]:
    """The rows with their numbers from 1; a ValueError in place of one that is no JSON object."""
    if hub_datasets.is_hub(source):
        try:
            data = hub_datasets.load(hub_datasets.parse(source))
        except UserError as error:
            raise _of(name, error) from None
        yield from enumerate((dict(row) for row in data.dataset), start=1)
        return
    if generated.is_generated(source):
        yield from enumerate(generated.rows(name, source), start=1)
        return
    path = home(name, source)
    if not path.is_file():
        raise UserError(f"{name}: {source!r}: no such file (allowed: {ALLOWED})")
    if (suffix := inner_suffix(path)) not in (".jsonl", ".ndjson", ".json"):
        raise UserError(f"{name}: {source!r} ends in {suffix or 'nothing'} (allowed: {ALLOWED})")
    try:
        yield from (_array(name, path) if suffix == ".json" else _lines(path))
    except NotTextError as error:
        raise UserError(f"{name}: {source!r} {error}") from None
    except UserError as error:
        raise _of(name, error) from None


def _of(name: str, error: UserError) -> UserError:
    """An error of reading a corpus, said of this setting."""
    return UserError(str(error).replace("corpus:", f"{name}:", 1))


def _lines(path: Path) -> Iterator[tuple[int, Fields | ValueError]]:
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield number, _made(partial(_parsed, line))


def _parsed(line: str) -> Fields | ValueError:
    return _object(json.loads(line))


def _array(name: str, path: Path) -> Iterator[tuple[int, Fields | ValueError]]:
    with open_text(path) as file:
        try:
            rows = json.load(file, parse_int=_integer)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{name}: {str(path)!r}: not JSON ({error})") from None
    if not isinstance(rows, list):
        raise UserError(f"{name}: {str(path)!r} holds no list of rows (allowed: {ALLOWED})")
    yield from ((number, _made(partial(_object, row))) for number, row in enumerate(rows, start=1))


def _made(make: Callable[[], Fields | ValueError]) -> Fields | ValueError:
    """A row; a ValueError in place of one that Python can't hold: nested too deep, an integer too long."""
    try:
        return make()
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def _integer(digits: str) -> int | ValueError:
    """An integer of a file that is parsed whole: an error belongs to its row, not to the file."""
    try:
        return int(digits)
    except ValueError as error:
        return error


def _object(row: object) -> Fields | ValueError:
    if not isinstance(row, dict):
        return ValueError("not a JSON object")
    return {encodable_text(str(name)): _encodable(value) for name, value in row.items()}


def _encodable(value: object) -> object:
    """A JSON value whose texts, at any depth, can be encoded as UTF-8."""
    if isinstance(value, str):
        return encodable_text(value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, ValueError):
        raise value
    return _object(value) if isinstance(value, dict) else value
