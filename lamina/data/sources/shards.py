"""A corpus as shards that can be read from any position on: its files, or the shards of a data set of the hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lamina.data.corpus import (
    ALLOWED,
    EMBEDDED,
    EMBEDDED_PATH,
    corpus_fingerprint,
    validate_corpus,
    walk,
    warn_once,
)
from lamina.data.sources import hub
from lamina.data.sources.documents import Document, encodable, has_text, read_file
from lamina.data.sources.files import NotTextError
from lamina.errors import UserError

_HASHED_BYTES = 2**30
_PART_CHARS = 2**20  # a run that is resumed reads one of them twice


class Shard(Protocol):
    """A part of a corpus, read from its beginning or from a position (made of JSON's types) that it gave itself."""

    def read(self, position: Any = None) -> Iterator[tuple[Document, Any]]:
        """The documents from a position on, those without text left out, each with the position behind it.

        Raises:
            UserError: what is there can't be read.
        """
        ...


@dataclass(frozen=True)
class FileShard:
    """A file. One that is not text is passed over with a warning where it came with a folder (``root``).

    ``state``: its size and time of change when the run began (see ``state_of``).
    """

    corpus: str
    path: Path
    root: Path | None
    text_field: str
    state: tuple[int, int]

    def read(self, position: Any = None) -> Iterator[tuple[Document, Any]]:
        name = self.path.name if self.root is None else self.path.relative_to(self.root).as_posix()
        offset, number = position or (0, 0)
        begun = number > 0
        try:
            self._refuse_change()
            for document, after in read_file(
                self.path, name, self.text_field, (offset, number), part_chars=_PART_CHARS
            ):
                begun = True
                if has_text(document):
                    yield encodable(document), after
            self._refuse_change()
        except NotTextError as error:
            if self.root is None:
                raise UserError(f"--corpus {self.corpus!r} {error} (allowed: {ALLOWED})") from None
            if begun:
                raise UserError(f"--corpus {str(self.path)!r} {error}, after some text; mend or remove it") from None
            warn_once(f"{self.path}: skipped, not text ({error})")
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            raise UserError(f"--corpus {str(self.path)!r} could not be read ({reason}); mend it and resume") from error

    def _refuse_change(self) -> None:
        if state_of(self.path) != self.state:
            raise UserError(
                f"--corpus {str(self.path)!r} has changed while the run was reading it (allowed: files that stay as "
                "they are; put it back and resume)"
            )


def state_of(path: Path) -> tuple[int, int]:
    """A file's size in bytes and time of change in nanoseconds."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class HubShard:
    """A shard of a data set that the datasets library streams; its positions are that library's own."""

    corpus: str
    dataset: Any
    index: int
    text_field: str

    def read(self, position: Any = None) -> Iterator[tuple[Document, Any]]:
        # made anew: two readers of one would share a position
        dataset = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        if position is not None:
            dataset.load_state_dict(position)
        number = 0
        try:
            for text in hub.streamed_texts(self.corpus, dataset, self.text_field):
                number += 1
                document = Document(name=f"{self.corpus}#{number}", text=text)
                if has_text(document):
                    yield encodable(document), dataset.state_dict()
        except UserError:
            raise
        # the network's and the formats' errors are of dozens of types
        except Exception as error:
            raise UserError(
                f"--corpus {self.corpus!r} could not be read on ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}); resume when it can"
            ) from error


@dataclass(frozen=True)
class Shards:
    """A corpus' shards, in order. ``bytes``: on disk, None where not known. ``fingerprint``: changes with the text."""

    shards: Sequence[Shard]
    bytes: int | None
    fingerprint: str


def open_shards(corpus: str, text_field: str) -> Shards:
    """The shards of a corpus, without reading their text.

    The fingerprint of up to 1 GiB of files is the one of their content. Of more it is made of the files' names, sizes
    and times of change; of a data set of the hub, of its name and its builder's hash.

    Raises:
        UserError: the corpus is missing or cannot be opened.
    """
    validate_corpus(corpus)
    if hub.is_hub(corpus):
        source = hub.parse(corpus)
        dataset, made_from = hub.stream(source)
        count = dataset.num_shards
        if source.folder is not None:
            paths = walk(source.folder)
            made_from = _fingerprint(corpus, text_field, source.folder, paths, [state_of(path) for path in paths])
        digest = hashlib.sha256(f"stream\0{corpus}\0{text_field}\0{made_from}\0{count}".encode()).hexdigest()
        return Shards([HubShard(corpus, dataset, index, text_field) for index in range(count)], None, digest)
    path = EMBEDDED_PATH if corpus == EMBEDDED else Path(corpus).expanduser()
    root = path if path.is_dir() else None
    paths = [path] if root is None else walk(root)
    states = [state_of(found) for found in paths]  # before their content is hashed: what comes later is a change
    shards = [FileShard(corpus, found, root, text_field, state) for found, state in zip(paths, states, strict=True)]
    fingerprint = _fingerprint(corpus, text_field, root or path.parent, paths, states)
    return Shards(shards, sum(size for size, _ in states), fingerprint)


def _fingerprint(corpus: str, text_field: str, root: Path, paths: list[Path], states: list[tuple[int, int]]) -> str:
    if sum(size for size, _ in states) <= _HASHED_BYTES:
        return corpus_fingerprint(corpus, text_field)
    digest = hashlib.sha256(f"stream\0{text_field}\0".encode())
    for path, (size, changed) in zip(paths, states, strict=True):
        digest.update(os.fsencode(path.relative_to(root).as_posix()) + f"\0{size}\0{changed}\0".encode())
    return digest.hexdigest()
