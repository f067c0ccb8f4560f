"""One file to text: gzip, xz and zstandard are undone, UTF-8 is required, and large files come in parts."""

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
"""Files longer than this many characters are read in parts, so that memory stays bounded."""

_SNIFF_BYTES = 8192
_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\x00", "zstandard": b"\x28\xb5\x2f\xfd"}
_SUFFIXES = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class NotTextError(Exception):
    """The file is not text that can be read, and the message says why. A folder skips it, a file named is an error."""


def inner_suffix(path: Path) -> str:
    """The suffix under the compression's: ``.jsonl`` for ``rows.jsonl.gz``, in lower case."""
    name = path.name.lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def compression(path: Path) -> str | None:
    """The compression of a file by its first bytes, or None; the name only matters when it promises what is not there.

    Raises:
        NotTextError: when the name ends in a compression's suffix and the content is something else.
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
    r"""The decompressed file as UTF-8 text: a byte order mark is dropped, line ends (``\n``) stay as they are.

    ``start``: the byte of the text to begin at. A compressed file is decompressed up to there, and nothing more.

    Raises:
        NotTextError: binary, not UTF-8 or damaged; also from inside the with block, whenever reading reaches the fault.
        UserError: zstandard is needed and not installed, or the file may not be read.
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
            # newline="\n": neither a lone \r nor \r\n is rewritten, so that bytes are counted as the file has them
            with io.TextIOWrapper(buffered, encoding="utf-8", newline="\n") as text:
                yield text
    except UnicodeDecodeError:
        raise NotTextError("is binary or not UTF-8") from None
    except damaged as error:
        raise NotTextError(f"is damaged ({error})") from None
    except PermissionError as error:
        raise UserError(f"corpus: {str(path)!r} may not be read ({error.strerror})") from None


def _skip(file: IO[bytes], count: int, *, seekable: bool) -> None:
    if seekable:
        file.seek(count)
        return
    while count > 0 and (passed := file.read(min(count, 1 << 20))):
        count -= len(passed)


def read_parts(path: Path, part_chars: int = PART_CHARS, start: int = 0) -> Iterator[str]:
    """The file's text in parts of about ``part_chars`` characters, which end at a line's end if one is near.

    ``start``: as of :func:`open_text`.

    Raises:
        NotTextError, UserError: as :func:`open_text`.
    """
    with open_text(path, start) as text:
        while part := text.read(part_chars):
            # a bounded look for the end of the line: a file may be one line of gigabytes
            yield part if part.endswith("\n") else part + text.readline(part_chars)
