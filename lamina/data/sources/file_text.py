"""The text of one file: decompressed (gzip, xz, zstandard), required to be UTF-8, in parts where it is large."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO, cast

from lamina.errors import UserError

PART_CHARS = 16 * 1024 * 1024
"""Files longer than this many characters are read in parts to bound memory."""

_SNIFF_BYTES = 8192
_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\x00", "zstandard": b"\x28\xb5\x2f\xfd"}
_SUFFIXES = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class NotTextError(Exception):
    """The file is no readable text, and the message says why. Folders skip it; naming it is an error."""


def inner_suffix(path: Path) -> str:
    """The suffix before that of the compression, in lower case: ``.jsonl`` for ``rows.jsonl.gz``."""
    name = path.name.lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def compression(path: Path) -> str | None:
    """The compression of a file, or None, decided by its first bytes.

    Raises:
        NotTextError: the name has the suffix of a compression, but the content is something else.
    """
    with path.open("rb") as file:
        head = file.read(8)
    for kind, magic in _MAGIC.items():
        if head.startswith(magic):
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
    return _zstd_reader(file) if kind == "zstandard" else file


def _zstd_reader(file: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"corpus: {file.name!r} is compressed with zstandard, which needs: pip install lamina[zstd]"
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
    r"""The decompressed file as UTF-8 text, without a byte order mark and with its line ends (``\n``) unchanged.

    ``start``: the byte of the text to begin at. A compressed file is decompressed up to there.

    Raises:
        NotTextError: the file is binary, not UTF-8 or damaged; raised inside the with block, too.
        UserError: zstandard is needed and not installed, or reading the file is not permitted.
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
            _skip(buffered, start + len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8), seekable=kind is None)
            # newline="\n": neither a lone \r nor \r\n is rewritten, so that bytes are counted as in the file
            with io.TextIOWrapper(buffered, encoding="utf-8", newline="\n") as text:
                yield text
    except UnicodeDecodeError:
        raise NotTextError("is binary or not UTF-8") from None
    except damaged as error:
        raise NotTextError(f"is damaged ({error})") from None
    except PermissionError as error:
        raise UserError(f"corpus: {str(path)!r} cannot be read ({error.strerror})") from None


def encodable_text(text: str) -> str:
    """The text with each half of a surrogate pair, which JSON can hold and UTF-8 cannot, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _skip(file: IO[bytes], count: int, *, seekable: bool) -> None:
    if seekable:
        file.seek(count)
        return
    while count > 0 and (passed := file.read(min(count, 1 << 20))):
        count -= len(passed)


def read_parts(path: Path, part_chars: int = PART_CHARS, start: int = 0) -> Iterator[str]:
    """The text of a file in parts of about ``part_chars`` characters, each ending with a line if its end is near.

    ``start`` and errors: see :func:`open_text`.
    """
    with open_text(path, start) as text:
        while part := text.read(part_chars):
            # the search for the end of the line is bounded: a file may be one line of gigabytes
            yield part if part.endswith("\n") else part + text.readline(part_chars)
