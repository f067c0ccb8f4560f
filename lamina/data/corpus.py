"""Where text comes from: the embedded corpus, files and folders of the user's own, and data sets of the hub."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lamina.data import hub
from lamina.data.files import NotTextError, inner_suffix, open_text, read_parts
from lamina.errors import UserError, nearest

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""The built-in corpus: Jane Austen's six novels and Moby-Dick, a paragraph a line, 5.2 MB, public domain."""

_EMBEDDED_PATH = Path(__file__).with_name("austen_moby.txt.xz")
_ALLOWED = (
    "embedded, a UTF-8 text file, a .jsonl file with a text field, either with .gz, .xz or .zst, a folder of these, "
    "or hf:NAME[:CONFIG][@SPLIT]"
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text that stands by itself: a file, a row of a .jsonl file, a row of a data set.

    A file of more than about 16 million characters comes as several Documents; all but the first have ``continues``.
    """

    name: str
    text: str
    continues: bool = False


def validate_corpus(corpus: str) -> None:
    """Check that the corpus is there, without reading it.

    Raises:
        UserError: when it is neither ``embedded``, a file, a folder nor ``hf:NAME``.
    """
    if corpus == EMBEDDED:
        return
    if hub.is_hub(corpus):
        hub.parse(corpus)
        return
    if not corpus:
        raise UserError(f"--corpus is empty (allowed: {_ALLOWED})")
    path = Path(corpus).expanduser()
    if not path.exists():
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        hint = nearest(path.name, [EMBEDDED, *siblings])
        raise UserError(f"--corpus {corpus!r}: no such file or folder{hint} (allowed: {_ALLOWED})")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"--corpus {corpus!r} is neither a regular file nor a folder (allowed: {_ALLOWED})")


def read_corpus(corpus: str, *, text_field: str = "text") -> Iterator[Document]:
    """Stream the documents of a corpus, always in the same order; those without any text are left out.

    Folders are walked recursively in the order of their relative names. Hidden files and folders are skipped; so are
    files that are not text, with one warning that counts them.

    Args:
        corpus: ``embedded``, a file, a folder or ``hf:NAME[:CONFIG][@SPLIT]``.
        text_field: the field of .jsonl rows and the column of data sets that holds the text.

    Raises:
        UserError: at once when the corpus is missing; while reading when a named file is binary, a row has no such
            field, or there is no text at all.
    """
    validate_corpus(corpus)
    return _non_empty(corpus, text_field)


def corpus_fingerprint(corpus: str, text_field: str = "text") -> str:
    """A hash (64 hexadecimal digits) that changes when the corpus' content, its files' names or the text field do.

    Files and folders: SHA-256 over relative names and bytes. The hub: name, configuration, split and the library's own
    fingerprint of the data set.

    Raises:
        UserError: when the corpus is missing or cannot be read.
    """
    validate_corpus(corpus)
    digest = hashlib.sha256(f"text_field={text_field}\0".encode())
    if hub.is_hub(corpus):
        source = hub.parse(corpus)
        digest.update(f"hf\0{source.config}\0{source.split}\0".encode())
        if source.folder is None:
            digest.update(f"{source.name}\0{hub.load(source).fingerprint}".encode())
        else:
            _hash_files(digest, source.folder)
    else:
        _hash_files(digest, _EMBEDDED_PATH if corpus == EMBEDDED else Path(corpus).expanduser())
    return digest.hexdigest()


def _hash_files(digest: hashlib._Hash, root: Path) -> None:
    for path in _walk(root) if root.is_dir() else [root]:
        name = os.fsencode(path.relative_to(root if root.is_dir() else root.parent).as_posix())
        try:
            with path.open("rb") as file:
                # each file's own hash, so that bytes cannot move from one file to the next unnoticed
                content = hashlib.file_digest(file, "sha256").digest()
        except PermissionError as error:
            raise UserError(f"--corpus {str(path)!r} may not be read ({error.strerror})") from None
        digest.update(name + b"\0" + content)


def _walk(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for name in files if not name.startswith(".") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _non_empty(corpus: str, text_field: str) -> Iterator[Document]:
    empty = True
    for document in _documents(corpus, text_field):
        if document.text and (document.continues or not document.text.isspace()):
            empty = False
            yield _encodable(document)
    if empty:
        raise UserError(f"--corpus {corpus!r} holds no text (allowed: {_ALLOWED})")


def _encodable(document: Document) -> Document:
    """JSON may hold half a surrogate pair, which no UTF-8 has: it becomes U+FFFD."""
    try:
        document.text.encode()
    except UnicodeEncodeError:
        text = document.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return Document(name=document.name, text=text, continues=document.continues)
    return document


def _documents(corpus: str, text_field: str) -> Iterator[Document]:
    if hub.is_hub(corpus):
        source = hub.parse(corpus)
        for number, text in enumerate(hub.load(source).texts(text_field)):
            yield Document(name=f"{corpus}#{number}", text=text)
        return
    path = _EMBEDDED_PATH if corpus == EMBEDDED else Path(corpus).expanduser()
    if path.is_dir():
        yield from _read_folder(path, text_field)
        return
    try:
        yield from _read_file(path, path.name, text_field)
    except NotTextError as error:
        raise UserError(f"--corpus {corpus!r} {error} (allowed: {_ALLOWED})") from None


def _read_folder(root: Path, text_field: str) -> Iterator[Document]:
    skipped: list[str] = []
    for path in _walk(root):
        name = path.relative_to(root).as_posix()
        begun = False
        try:
            for document in _read_file(path, name, text_field):
                begun = True
                yield document
        except NotTextError as error:
            if begun:
                # what was handed out cannot be taken back, and half a file is not what anyone asked for
                raise UserError(f"--corpus {str(path)!r} {error}, after some text; mend or remove it") from None
            skipped.append(f"{name} {error}")
    if skipped:
        _warn_once(f"{root}: {len(skipped)} files skipped that are not text ({'; '.join(skipped[:3])})")


@functools.cache
def _warn_once(message: str) -> None:
    """A corpus is read more than once, to be measured and to be split; it is one warning all the same."""
    logger.warning("%s", message)


def _read_file(path: Path, name: str, text_field: str) -> Iterator[Document]:
    if inner_suffix(path) in (".jsonl", ".ndjson"):
        yield from _read_rows(path, name, text_field)
        return
    for number, part in enumerate(read_parts(path)):
        yield Document(name=name, text=part, continues=number > 0)


def _read_rows(path: Path, name: str, text_field: str) -> Iterator[Document]:
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"--corpus {str(path)!r}, line {number}"
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
            yield Document(name=f"{name}:{number}", text=text)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
