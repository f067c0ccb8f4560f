"""Where text comes from: the embedded corpus, files and folders of the user's own, and data sets of the hub."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from lamina.data.sources import hub
from lamina.data.sources.documents import Document, encodable, has_text, read_file
from lamina.data.sources.files import NotTextError
from lamina.errors import UserError, nearest

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""The built-in corpus: Jane Austen's six novels and Moby-Dick, a paragraph a line, 5.2 MB, public domain."""

EMBEDDED_PATH = Path(__file__).with_name("austen_moby.txt.xz")
ALLOWED = (
    "embedded, a UTF-8 text file, a .jsonl file with a text field, either with .gz, .xz or .zst, a .parquet file, a "
    "folder of these, or hf:NAME[:CONFIG][@SPLIT]"
)


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
        raise UserError(f"--corpus is empty (allowed: {ALLOWED})")
    path = Path(corpus).expanduser()
    if not path.exists():
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        hint = nearest(path.name, [EMBEDDED, *siblings])
        raise UserError(f"--corpus {corpus!r}: no such file or folder{hint} (allowed: {ALLOWED})")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"--corpus {corpus!r} is neither a regular file nor a folder (allowed: {ALLOWED})")


def read_corpus(corpus: str, *, text_field: str = "text") -> Iterator[Document]:
    """Stream the documents of a corpus, always in the same order; those without any text are left out.

    Folders are walked recursively in the order of their relative names. Hidden files and folders are skipped; so are
    files that are not text, with one warning that counts them.

    Args:
        corpus: ``embedded``, a file, a folder or ``hf:NAME[:CONFIG][@SPLIT]``.
        text_field: the field of .jsonl rows and the column of .parquet files and data sets that holds the text.

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
        _hash_files(digest, EMBEDDED_PATH if corpus == EMBEDDED else Path(corpus).expanduser())
    return digest.hexdigest()


def _hash_files(digest: hashlib._Hash, root: Path) -> None:
    for path in walk(root) if root.is_dir() else [root]:
        name = os.fsencode(path.relative_to(root if root.is_dir() else root.parent).as_posix())
        try:
            with path.open("rb") as file:
                # each file's own hash, so that bytes cannot move from one file to the next unnoticed
                content = hashlib.file_digest(file, "sha256").digest()
        except PermissionError as error:
            raise UserError(f"--corpus {str(path)!r} may not be read ({error.strerror})") from None
        digest.update(name + b"\0" + content)


def changed_since(corpus: str, moment: float) -> list[Path]:
    """The corpus' files whose time of change is later than ``moment`` (seconds since 1970), none where it has no files.

    A mix is asked about part by part.
    """
    source = hub.parse(corpus).folder if hub.is_hub(corpus) else Path(corpus).expanduser()
    if corpus == EMBEDDED or source is None or not source.exists():
        return []
    return [path for path in (walk(source) if source.is_dir() else [source]) if path.stat().st_mtime > moment]


def walk(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for name in files if not name.startswith(".") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _non_empty(corpus: str, text_field: str) -> Iterator[Document]:
    empty = True
    for document in _documents(corpus, text_field):
        if has_text(document):
            empty = False
            yield encodable(document)
    if empty:
        raise UserError(f"--corpus {corpus!r} holds no text (allowed: {ALLOWED})")


def _documents(corpus: str, text_field: str) -> Iterator[Document]:
    if hub.is_hub(corpus):
        source = hub.parse(corpus)
        for number, text in enumerate(hub.load(source).texts(text_field)):
            yield Document(name=f"{corpus}#{number}", text=text)
        return
    path = EMBEDDED_PATH if corpus == EMBEDDED else Path(corpus).expanduser()
    if path.is_dir():
        yield from _read_folder(path, text_field)
        return
    try:
        yield from (document for document, _ in read_file(path, path.name, text_field))
    except NotTextError as error:
        raise UserError(f"--corpus {corpus!r} {error} (allowed: {ALLOWED})") from None


def _read_folder(root: Path, text_field: str) -> Iterator[Document]:
    skipped: list[str] = []
    for path in walk(root):
        name = path.relative_to(root).as_posix()
        begun = False
        try:
            for document, _ in read_file(path, name, text_field):
                begun = True
                yield document
        except NotTextError as error:
            if begun:
                # what was handed out cannot be taken back, and half a file is not what anyone asked for
                raise UserError(f"--corpus {str(path)!r} {error}, after some text; mend or remove it") from None
            skipped.append(f"{name} {error}")
    if skipped:
        warn_once(f"{root}: {len(skipped)} files skipped that are not text ({'; '.join(skipped[:3])})")


@functools.cache
def warn_once(message: str) -> None:
    """A corpus is read more than once, to be measured and to be split; it is one warning all the same."""
    logger.warning("%s", message)
