"""A corpus as shards that can be read from any position on: its files, or the shards of a data set of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lamina.data.sources import ALLOWED, hub_datasets
from lamina.data.sources.file_documents import Document, Position, encodable, has_text, read_file
from lamina.data.sources.file_text import NotTextError
from lamina.data.sources.folder import FileState, state_of
from lamina.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

_PART_CHARS = 2**20  # a run that is resumed reads one of them twice


class Shard(Protocol):
    """A part of a corpus, read from its beginning or from a position (made of JSON's types) that it gave itself."""

    def read(self, position: object = None) -> Iterator[tuple[Document, object]]:
        """The documents from a position on, those without text left out, each with the position behind it.

        Raises:
            UserError: the shard can't be read.
        """
        ...


@dataclass(frozen=True)
class FileShard:
    """A file. One that is not text is passed over with a warning where it came with a folder (``root``).

    ``state``: when the run began. ``warn`` logs a message.
    """

    corpus: str
    path: Path
    root: Path | None
    text_field: str
    state: FileState
    warn: Callable[[str], None]

    def read(self, position: object = None) -> Iterator[tuple[Document, Position]]:
        name = self.path.name if self.root is None else self.path.relative_to(self.root).as_posix()
        offset, number = cast("Position | None", position) or (0, 0)
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
                raise UserError(f"corpus: {self.corpus!r} {error} (allowed: {ALLOWED})") from None
            if begun:
                raise UserError(f"corpus: {str(self.path)!r} {error}, after some text; fix or remove it") from None
            self.warn(f"{self.path}: skipped, not text ({error})")
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            raise UserError(f"corpus: {str(self.path)!r} could not be read ({reason}); fix it and resume") from error

    def _refuse_change(self) -> None:
        if state_of(self.path) != self.state:
            raise UserError(
                f"corpus: {str(self.path)!r} has changed while the run was reading it (allowed: files that stay as "
                "they are; put it back and resume)"
            )


@dataclass(frozen=True)
class HubShard:
    """A shard of a data set that the datasets library streams; its positions are that library's own."""

    corpus: str
    dataset: IterableDataset
    index: int
    text_field: str

    def read(self, position: object = None) -> Iterator[tuple[Document, object]]:
        # made anew: two readers of one would share a position
        dataset = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        if position is not None:
            dataset.load_state_dict(cast("dict", position))
        number = 0
        try:
            for text in hub_datasets.streamed_texts(self.corpus, dataset, self.text_field):
                number += 1
                document = Document(name=f"{self.corpus}#{number}", text=text)
                if has_text(document):
                    yield encodable(document), dataset.state_dict()
        except UserError:
            raise
        # the network's and the formats' errors are of dozens of types
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"corpus: {self.corpus!r} stopped being readable ({reason}); resume when it is") from error


@dataclass(frozen=True)
class Shards:
    """A corpus' shards, in order. ``bytes``: on disk, None where not known. ``fingerprint``: changes with the text."""

    shards: Sequence[Shard]
    bytes: int | None
    fingerprint: str
