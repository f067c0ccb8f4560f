"""The documents of one file, from its beginning or from any position."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lamina.data.sources.file_text import PART_CHARS, NotTextError, encodable_text, inner_suffix, open_text, read_parts
from lamina.errors import UserError, nearest, unknown

Position = tuple[int, int]
"""Where the next document of a file begins: the byte of its text (in .parquet files: the row), and the number of lines,
rows or parts before it."""

_ROWS = 1024
_OPENING = re.compile(r"\s*(?:\[\s*)?\{")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A self-contained text: a file, or a row of a .jsonl file, a .parquet file or a data set.

    A long file (more than 16 million characters; one million when streamed) comes as several Documents, of which all
    but the first have ``continues``.
    """

    name: str
    text: str
    continues: bool = False


def read_file(
    path: Path,
    name: str,
    text_field: str,
    start: Position = (0, 0),
    *,
    part_chars: int = PART_CHARS,
    on_rows: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Document, Position]]:
    """The documents of a file from ``start`` on, each with the position after it.

    Args:
        path: of the file; its suffix says whether it holds rows.
        name: of the file in the corpus.
        text_field: the field of a row that holds its text.
        start: where to begin.
        part_chars: plain text comes in parts of about this many characters.
        on_rows: called for a file that is read as plain text, but begins with a JSON row that has the field.

    Raises:
        NotTextError: the file is binary, not UTF-8, damaged, or no valid .parquet file.
        UserError: a row does not have the field, or its value is no text; or reading the file is not permitted.
    """
    suffix = inner_suffix(path)
    if suffix in (".jsonl", ".ndjson"):
        return _rows(path, name, text_field, start)
    if suffix == ".parquet":
        return _table(path, name, text_field, start)
    return _parts(path, name, start, part_chars, lambda part: on_rows() if _begins_with_row(part, text_field) else None)


def rows_as_text(corpus: str, text_field: str) -> str:
    """The warning where JSON rows are read as plain text."""
    return (
        f"{corpus}: JSON rows with the field {text_field!r} are read as plain text, braces and all, where the file's "
        "name does not say so (rows: one per line in a .jsonl, or .parquet)"
    )


def has_text(document: Document) -> bool:
    """Whether a document counts: one of white space alone does not, unless it continues another."""
    return bool(document.text) and (document.continues or not document.text.isspace())


def encodable(document: Document) -> Document:
    """The document with each half of a surrogate pair, which JSON can hold and UTF-8 cannot, replaced by U+FFFD."""
    text = encodable_text(document.text)
    if text is document.text:
        return document
    return Document(name=document.name, text=text, continues=document.continues)


def _parts(
    path: Path, name: str, start: Position, part_chars: int, first: Callable[[str], None]
) -> Iterator[tuple[Document, Position]]:
    offset, number = start
    for part in read_parts(path, part_chars, offset):
        if number == 0:
            first(part)
        offset += len(part.encode())
        yield Document(name=name, text=part, continues=number > 0), (offset, number + 1)
        number += 1


def _begins_with_row(text: str, text_field: str) -> bool:
    """Whether a text begins with a JSON object, alone or first in a list, whose field is a text."""
    opening = _OPENING.match(text)
    if opening is None:
        return False
    try:
        row, _ = json.JSONDecoder().raw_decode(text, opening.end() - 1)
    except (ValueError, RecursionError):
        return False
    return isinstance(row.get(text_field), str)


def _rows(path: Path, name: str, text_field: str, start: Position) -> Iterator[tuple[Document, Position]]:
    offset, before = start
    with open_text(path, start=offset) as lines:
        for number, line in enumerate(lines, start=before + 1):
            offset += len(line.encode())
            if not line.strip():
                continue
            where = f"corpus: {str(path)!r}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: a row must be an object with the field {text_field!r}, not {_kind(row)}")
            if text_field not in row:
                hint = nearest(text_field, row)
                raise UserError(f"{where}: no field {text_field!r}{hint} (text_field; the row has: {', '.join(row)})")
            text = row[text_field]
            if not isinstance(text, str):
                raise UserError(f"{where}: the field {text_field!r} must be a string, not {_kind(text)}")
            yield Document(name=f"{name}:{number}", text=text), (offset, number)


def _table(path: Path, name: str, text_field: str, start: Position) -> Iterator[tuple[Document, Position]]:
    """The rows of a .parquet file, read at most one row group at a time; null is an empty text, as in data sets."""
    import pyarrow
    from pyarrow import parquet

    row = start[0]
    try:
        with parquet.ParquetFile(path.absolute()) as file:
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise unknown(f"text_field of the corpus {str(path)!r}:", text_field, schema.names)
            kind = schema.field(text_field).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind  # a column of few different texts
            if not any(is_text(values) for is_text in _text_types()):
                raise UserError(f"corpus: {str(path)!r}: the column {text_field!r} must hold strings, not {kind}")
            groups, first = [], 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first + rows > row:
                    groups.append(group)
                elif not groups:
                    first += rows
            skip = row - first
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_field]):
                texts = batch.column(0)[min(skip, len(batch)) :].to_pylist()
                skip -= min(skip, len(batch))
                for text in texts:
                    row += 1
                    yield Document(name=f"{name}:{row}", text=text or ""), (row, row)
    except pyarrow.ArrowInvalid as error:
        raise NotTextError(f"is no parquet file that can be read ({' '.join(str(error).split())[:200]})") from None
    except PermissionError as error:
        raise UserError(f"corpus: {str(path)!r} cannot be read ({error.strerror})") from None


def _text_types() -> list[Callable[[object], bool]]:
    from pyarrow import types

    return [types.is_string, types.is_large_string, types.is_string_view]


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
