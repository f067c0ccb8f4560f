"""The shards of a corpus, each readable from any position: its files, or the shards of a hub data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lamina.data.sources import ALLOWED, hub_datasets
from lamina.data.sources.file_documents import Document, Position, encodable, has_text, read_file, rows_as_text
from lamina.data.sources.file_text import NotTextError
from lamina.data.sources.folder import FileState, state_of
from lamina.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

_PART_CHARS = 2**20  # a resumed run reads one of them again


class Shard(Protocol):
    """A part of a corpus, readable from its beginning or from a position that an earlier read returned (JSON types)."""

    def read(self, position: object = None) -> Iterator[tuple[Document, object]]:
        """The documents with text from a position on, each with the position after it.

        Raises:
            UserError: the shard cannot be read.
        """
        ...


@dataclass(frozen=True)
class FileShard:
    """A file. In a folder (``root``), a file that is not text is skipped with a warning.

    ``state``: the file's state at the beginning of the run. ``warn`` logs a message.
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
                self.path,
                name,
                self.text_field,
                (offset, number),
                part_chars=_PART_CHARS,
                on_rows=lambda: self.warn(rows_as_text(self.corpus, self.text_field)),
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
    """A shard of a data set that the datasets library streams; the positions are that library's."""

    corpus: str
    dataset: IterableDataset
    index: int
    text_field: str

    def read(self, position: object = None) -> Iterator[tuple[Document, object]]:
        # a new object for each read: two readers of one object would share a position
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
        # networks and formats raise dozens of types
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"corpus: {self.corpus!r} stopped being readable ({reason}); resume when it is") from error


@dataclass(frozen=True)
class Shards:
    """The shards of a corpus in order; ``bytes``: their size on disk, None if unknown; ``fingerprint``: of the text."""

    shards: Sequence[Shard]
    bytes: int | None
    fingerprint: str
