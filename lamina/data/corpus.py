"""A corpus as an object: the embedded one, files and folders, data sets of the hub, and mixes of these."""

from __future__ import annotations

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from lamina.data.sources import ALLOWED, hub_datasets
from lamina.data.sources.file_documents import Document, Position, encodable, has_text, read_file, rows_as_text
from lamina.data.sources.file_text import NotTextError
from lamina.data.sources.folder import fingerprint_of_large, hash_files, state_of, walk
from lamina.data.sources.hub_datasets import HubSource
from lamina.data.sources.mix_spec import parse_mix
from lamina.data.sources.packaged import packaged_file
from lamina.data.sources.shards import FileShard, HubShard, Shards
from lamina.errors import UserError, nearest

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""The built-in corpus: Jane Austen's six novels and Moby-Dick, one paragraph per line, 5.2 MB, public domain."""

EMBEDDED_PATH = Path(__file__).with_name("austen_moby.txt.xz")


@dataclass(frozen=True, kw_only=True)
class Corpus(ABC):
    """The text of a run: one corpus or a mix. Created by :meth:`parse`; its ``parts`` are what can be read.

    Attributes:
        spec: the corpus as the user wrote it.
        text_field: the field of .jsonl rows, or the column of .parquet files and data sets, that holds the text.
    """

    spec: str
    text_field: str = "text"

    @staticmethod
    def parse(spec: str, text_field: str = "text") -> SingleCorpus | Mix:
        """The corpus with this name: embedded, a file, a folder, ``hf:NAME[:CONFIG][@SPLIT]``, a mix ``A:0.7,B:0.3``.

        Files and folders must exist; nothing is read yet.

        Raises:
            UserError: the name is malformed, or a file or folder does not exist.
        """
        parts = tuple(
            Part(corpus=single_corpus(name, text_field), share=share) for name, share in parse_mix(spec).items()
        )
        return Mix(spec=spec, text_field=text_field, mixed=parts) if parts else single_corpus(spec, text_field)

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The single corpora and their shares, which add up to 1."""

    def fingerprint(self) -> str:
        """A hash that changes with the content, the name of a file, or the text field, but not with a mix's shares.

        Files and folders: SHA-256 of relative names and bytes, 64 hexadecimal digits. The hub: of name, configuration,
        split and the library's own fingerprint of the data set. A mix: the hashes of its parts, joined.

        Raises:
            UserError: the corpus cannot be read.
        """
        return "+".join(part.corpus.fingerprint() for part in self.parts)

    def changed_since(self, time: float) -> list[Path]:
        """The files changed later than ``time`` (seconds since 1970); empty for a corpus without files."""
        return [path for part in self.parts for path in part.corpus.changed_since(time)]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A corpus of a mix and its share."""

    corpus: SingleCorpus
    share: Fraction


@dataclass(frozen=True, kw_only=True)
class Mix(Corpus):
    """Several corpora in fixed shares."""

    mixed: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.mixed


@dataclass(frozen=True, kw_only=True)
class SingleCorpus(Corpus):
    """A corpus that can be read: as a whole, or shard by shard from any position."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(corpus=self, share=Fraction(1)),)

    def documents(self) -> Iterator[Document]:
        """The documents with text, always in the same order.

        The files of a folder and its subfolders come in the order of their relative names, without hidden ones. Files
        that are not text are skipped, with one warning that counts them.

        Raises:
            UserError: a file named by the user is binary, a row does not have the field, or there is no text at all.
        """
        empty = True
        for document in self._documents():
            if has_text(document):
                empty = False
                yield encodable(document)
        if empty:
            raise UserError(f"corpus: {self.spec!r} holds no text (allowed: {ALLOWED})")

    @abstractmethod
    def _documents(self) -> Iterator[Document]: ...

    @abstractmethod
    def shards(self) -> Shards:
        """The shards of the corpus, without reading their text.

        Their fingerprint is that of the corpus for up to 1 GiB of files. Beyond that it is a hash of the names, sizes
        and times of change; for a data set of the hub, of its name and the hash of its builder.

        Raises:
            UserError: the corpus cannot be opened.
        """

    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def changed_since(self, time: float) -> list[Path]: ...

    def _new_digest(self) -> hashlib._Hash:
        return hashlib.sha256(f"text_field={self.text_field}\0".encode())


@dataclass(frozen=True, kw_only=True)
class FileCorpus(SingleCorpus):
    """A file, or the files of a folder."""

    path: Path
    _reported: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def fingerprint(self) -> str:
        digest = self._new_digest()
        hash_files(digest, self.path)
        return digest.hexdigest()

    def changed_since(self, time: float) -> list[Path]:
        return [path for path in self._files() if path.stat().st_mtime > time]

    def shards(self) -> Shards:
        root, paths = self.path if self.path.is_dir() else None, self._files()
        states = [state_of(path) for path in paths]  # before the content is hashed, so that any later change shows
        shards = [
            FileShard(self.spec, path, root, self.text_field, state, self._warn_once)
            for path, state in zip(paths, states, strict=True)
        ]
        fingerprint = fingerprint_of_large(root or self.path.parent, paths, states, self.text_field)
        return Shards(shards, sum(size for size, _ in states), fingerprint or self.fingerprint())

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path] if self.path.exists() else []
        linked: list[Path] = []
        paths = walk(self.path, linked)
        if linked:
            names = ", ".join(path.relative_to(self.path).as_posix() for path in linked[:3])
            more = ", ..." * (len(linked) > 3)
            self._warn_once(f"{self.path}: links to folders are not followed ({names}{more}); name them as a mix")
        return paths

    def _read(self, path: Path, name: str) -> Iterator[tuple[Document, Position]]:
        return read_file(
            path, name, self.text_field, on_rows=lambda: self._warn_once(rows_as_text(self.spec, self.text_field))
        )

    def _documents(self) -> Iterator[Document]:
        if self.path.is_dir():
            yield from self._folder_documents()
            return
        try:
            yield from (document for document, _ in self._read(self.path, self.path.name))
        except NotTextError as error:
            raise UserError(f"corpus: {self.spec!r} {error} (allowed: {ALLOWED})") from None

    def _folder_documents(self) -> Iterator[Document]:
        skipped: list[str] = []
        for path in self._files():
            name = path.relative_to(self.path).as_posix()
            begun = False
            try:
                for document, _ in self._read(path, name):
                    begun = True
                    yield document
            except NotTextError as error:
                if begun:
                    # its first documents have been handed out, and nobody wants half a file
                    raise UserError(f"corpus: {str(path)!r} {error}, after some text; fix or remove it") from None
                skipped.append(f"{name} {error}")
        if skipped:
            examples = "; ".join(skipped[:3])
            self._warn_once(f"{self.path}: {len(skipped)} files skipped that are not text ({examples})")

    def _warn_once(self, message: str) -> None:
        """Log a message once, however often the corpus is read."""
        if message not in self._reported:
            self._reported.add(message)
            logger.warning("%s", message)


@dataclass(frozen=True, kw_only=True)
class EmbeddedCorpus(FileCorpus):
    """The novels that come with Lamina."""

    spec: str = EMBEDDED
    path: Path = EMBEDDED_PATH

    def changed_since(self, time: float) -> list[Path]:
        return []


@dataclass(frozen=True, kw_only=True)
class HubCorpus(SingleCorpus):
    """One split of a data set, from the hub or from a folder that the datasets library reads."""

    source: HubSource

    def fingerprint(self) -> str:
        digest = self._new_digest()
        digest.update(f"hf\0{self.source.config}\0{self.source.split}\0".encode())
        if self.source.folder is None:
            digest.update(f"{self.source.name}\0{hub_datasets.load(self.source).fingerprint}".encode())
        else:
            hash_files(digest, self.source.folder)
        return digest.hexdigest()

    def changed_since(self, time: float) -> list[Path]:
        folder = self.source.folder
        return [] if folder is None else [path for path in walk(folder) if path.stat().st_mtime > time]

    def shards(self) -> Shards:
        dataset, content = hub_datasets.stream(self.source)
        count, folder = dataset.num_shards, self.source.folder
        if folder is not None:
            paths = walk(folder)
            states = [state_of(path) for path in paths]
            content = fingerprint_of_large(folder, paths, states, self.text_field) or self.fingerprint()
        identity = f"stream\0{self.spec}\0{self.text_field}\0{content}\0{count}"
        shards = [HubShard(self.spec, dataset, index, self.text_field) for index in range(count)]
        return Shards(shards, None, hashlib.sha256(identity.encode()).hexdigest())

    def _documents(self) -> Iterator[Document]:
        for number, text in enumerate(hub_datasets.load(self.source).texts(self.text_field)):
            yield Document(name=f"{self.spec}#{number}", text=text)


def single_corpus(spec: str, text_field: str = "text") -> SingleCorpus:
    """The corpus with this name, which is no mix. See :meth:`Corpus.parse`."""
    if spec == EMBEDDED:
        return EmbeddedCorpus(text_field=text_field)
    if (packaged := packaged_file(spec)) is not None:
        return FileCorpus(spec=spec, text_field=text_field, path=packaged)
    if hub_datasets.is_hub(spec):
        return HubCorpus(spec=spec, text_field=text_field, source=hub_datasets.parse(spec))
    if not spec:
        raise UserError(f"corpus: the name is empty (allowed: {ALLOWED})")
    path = Path(spec).expanduser()
    if not path.exists():
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        hint = nearest(path.name, [EMBEDDED, *siblings])
        raise UserError(f"corpus: {spec!r}: no such file or folder{hint} (allowed: {ALLOWED})")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"corpus: {spec!r} is neither a regular file nor a folder (allowed: {ALLOWED})")
    return FileCorpus(spec=spec, text_field=text_field, path=path)
