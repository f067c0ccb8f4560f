"""Read the documents of a file, from its beginning or from any position."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TextIO, TypeVar, cast

from lamina.core.extras import install
from lamina.errors import UserError, nearest, unknown

P = TypeVar("P")
PART_CHARS = 16 * 1024 * 1024
"""Lamina reads long files in parts of this many characters, to limit memory."""

_SNIFF_BYTES = 8192
_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\x00", "zstandard": b"\x28\xb5\x2f\xfd"}
_SUFFIXES = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
FileState = tuple[int, int]
"""The size of a file in bytes and the time of its last change in nanoseconds."""

_HASHED_BYTES = 2**30
Position = tuple[int, int]
"""The byte at which a file's next document begins (in .parquet files, the row), and the number of the lines, rows or
parts before the document.
"""

_ROWS = 1024
_OPENING = re.compile(r"\s*(?:\[\s*)?\{")


class NotTextError(Exception):
    """The file is not readable as text. Lamina skips the file in a folder, but stops if the user named the file."""


def inner_suffix(path: Path) -> str:
    """Return a file's lower-case suffix without the compression suffix: ``.jsonl`` for ``rows.jsonl.gz``."""
    name = path.name.lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def compression(path: Path) -> str | None:
    """Return a file's compression, or None. Raises NotTextError if an uncompressed file has a suffix such as .gz."""
    with path.open("rb") as file:
        head = file.read(8)
    if kind := next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None):
        return kind
    promised = _SUFFIXES.get(path.suffix.lower())
    if promised and head:
        raise NotTextError(f"ends in {path.suffix} but is not {promised}")
    return None


def _decompressed(file: IO[bytes], kind: str | None) -> IO[bytes]:
    if kind == "gzip":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    if kind == "xz":
        return lzma.LZMAFile(file)
    if kind is None:
        return file
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"corpus: {file.name!r} is compressed with zstandard, which is not installed. Run: {install('zstd')}"
        ) from None
    return cast("IO[bytes]", zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))


def _decompression_errors() -> tuple[type[Exception], ...]:
    errors: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)
    try:
        import zstandard
    except ImportError:
        return errors
    return (*errors, zstandard.ZstdError)


@contextmanager
def open_text(path: Path, start: int = 0) -> Iterator[TextIO]:
    """Open a plain or compressed file as UTF-8 text. Omit the byte order mark, and leave the line ends unchanged.

    ``start`` is the first byte to read, counted in the decompressed text.

    Raises:
        NotTextError: the file is binary, not UTF-8 or damaged. Reading from the open file may also raise this error.
        UserError: the file needs zstandard, which is not installed, or the user may not read the file.
    """
    damaged = _decompression_errors()
    try:
        kind = compression(path)
        with path.open("rb") as file:
            stream = cast("io.RawIOBase", _decompressed(file, kind))
            buffered = io.BufferedReader(stream, buffer_size=1 << 20)
            head = buffered.peek(_SNIFF_BYTES)[:_SNIFF_BYTES]
            if head.startswith(_WIDE_MARKS):
                raise NotTextError("is binary or not UTF-8 (it looks like UTF-16)")
            if b"\x00" in head:
                raise NotTextError("is binary or not UTF-8")
            start += len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8)
            if kind is None:
                buffered.seek(start)
            while kind is not None and start > 0 and (passed := buffered.read(min(start, 1 << 20))):
                start -= len(passed)
            # newline="\n" leaves \r and \r\n unchanged, so that Lamina counts the file's bytes
            with io.TextIOWrapper(buffered, encoding="utf-8", newline="\n") as text:
                yield text
    except UnicodeDecodeError:
        raise NotTextError("is binary or not UTF-8") from None
    except damaged as error:
        raise NotTextError(f"is damaged ({error})") from None
    except PermissionError as error:
        raise UserError(f"corpus: {str(path)!r} cannot be read ({error.strerror})") from None


def encodable_text(text: str) -> str:
    """Replace each unpaired surrogate with U+FFFD, because UTF-8 can't encode surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def walk(root: Path, linked: list[Path] | None = None) -> list[Path]:
    """Return the files below a folder, sorted by relative name, without hidden files and folders.

    Lamina follows links to files. Lamina does not follow links to folders, because such links may form a loop, but adds
    these links to the list ``linked``. Raises UserError for a folder that Lamina may not read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"corpus: {str(error.filename)!r} cannot be read ({error.strerror})") from None

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if linked is not None:
            linked += [path for name in folders if (path := Path(folder, name)).is_symlink()]
        try:
            paths += [path for name in files if not name.startswith(".") and (path := Path(folder, name)).is_file()]
        except PermissionError as error:  # a link into another user's folder
            refuse(error)
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def hash_files(digest: hashlib._Hash, root: Path) -> None:
    for path in walk(root) if root.is_dir() else [root]:
        name = os.fsencode(path.relative_to(root if root.is_dir() else root.parent).as_posix())
        try:
            with path.open("rb") as file:
                # a hash per file, to notice bytes that move from one file to the next
                content = hashlib.file_digest(file, "sha256").digest()
        except PermissionError as error:
            raise UserError(f"corpus: {str(path)!r} cannot be read ({error.strerror})") from None
        digest.update(name + b"\0" + content)


def state_of(path: Path) -> FileState:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def fingerprint_of_large(root: Path, paths: Sequence[Path], states: Sequence[FileState], text_field: str) -> str | None:
    """Hash the files' names, sizes and modification times if the files exceed 1 GiB in total. Otherwise return None."""
    if sum(size for size, _ in states) <= _HASHED_BYTES:
        return None
    digest = hashlib.sha256(f"stream\0{text_field}\0".encode())
    for path, (size, changed) in zip(paths, states, strict=True):
        digest.update(os.fsencode(path.relative_to(root).as_posix()) + f"\0{size}\0{changed}\0".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Document:
    """The text of a file, or of a row in a .jsonl file, a .parquet file or a dataset.

    Lamina divides a very long file into several Documents. ``continues`` is true for each Document after the first.
    """

    text: str
    continues: bool = False


def read_file(
    path: Path,
    text_field: str,
    start: Position = (0, 0),
    *,
    part_chars: int = PART_CHARS,
    on_rows: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Document, Position]]:
    """Yield each document of a file from the position ``start``, with the position after the document.

    Args:
        path: the file. The suffix decides whether Lamina reads rows or plain text.
        text_field: the field of a row that holds the text.
        start: the position of the first document.
        part_chars: the number of characters per Document of a long plain text.
        on_rows: a function to call if a plain-text file begins with a JSON row that has the field ``text_field``.

    Raises:
        NotTextError: the file is binary, not UTF-8, damaged, or not a valid .parquet file.
        UserError: a row lacks the field, the field's value is not text, or Lamina may not read the file.
    """
    suffix = inner_suffix(path)
    if suffix in (".jsonl", ".ndjson"):
        return _rows(path, text_field, start)
    if suffix == ".parquet":
        return _table(path, text_field, start)
    return _parts(path, text_field, start, part_chars, on_rows)


def with_text(documents: Iterable[tuple[Document, P]]) -> Iterator[tuple[Document, P]]:
    """Drop documents that contain only white space, and repair unpaired surrogates (see :func:`encodable_text`)."""
    for document, position in documents:
        if document.text and (document.continues or not document.text.isspace()):
            text = encodable_text(document.text)
            yield (document if text is document.text else replace(document, text=text)), position


def _parts(
    path: Path, text_field: str, start: Position, part_chars: int, on_rows: Callable[[], None]
) -> Iterator[tuple[Document, Position]]:
    """Yield Documents of about ``part_chars`` characters, which end at line ends unless a line is very long."""
    offset, number = start
    with open_text(path, offset) as text:
        while part := text.read(part_chars):
            # limit the search for the line's end, because a file may be one line of gigabytes
            part = part if part.endswith("\n") else part + text.readline(part_chars)
            if number == 0 and _begins_with_row(part, text_field):
                on_rows()
            offset += len(part.encode())
            yield Document(part, continues=number > 0), (offset, number + 1)
            number += 1


def _begins_with_row(text: str, text_field: str) -> bool:
    opening = _OPENING.match(text)
    if opening is None:
        return False
    try:
        row, _ = json.JSONDecoder().raw_decode(text, opening.end() - 1)
    except (ValueError, RecursionError):
        return False
    return isinstance(row.get(text_field), str)


def _rows(path: Path, text_field: str, start: Position) -> Iterator[tuple[Document, Position]]:
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
                raise UserError(
                    f"{where} has no field {text_field!r}{hint or '.'} Set text_field to one of: {', '.join(row)}."
                )
            text = row[text_field]
            if not isinstance(text, str):
                raise UserError(f"{where}: the field {text_field!r} must be a string, not {_kind(text)}")
            yield Document(text), (offset, number)


def _table(path: Path, text_field: str, start: Position) -> Iterator[tuple[Document, Position]]:
    """Yield the rows of a .parquet file, with at most one row group in memory. A null becomes an empty text."""
    import pyarrow
    from pyarrow import parquet

    row = start[0]
    try:
        with parquet.ParquetFile(path.absolute()) as file:
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise unknown("text_field", text_field, schema.names, f"corpus {str(path)!r}")
            kind = schema.field(text_field).type
            # a dictionary column stores each different text once
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            types = pyarrow.types
            if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
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
                    yield Document(text or ""), (row, row)
    except pyarrow.ArrowInvalid as error:
        raise NotTextError(f"is not a readable parquet file ({' '.join(str(error).split())[:200]})") from None
    except PermissionError as error:
        raise UserError(f"corpus: {str(path)!r} cannot be read ({error.strerror})") from None


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
