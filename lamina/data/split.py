"""Split a text into training text and held-out text. The split is the same for every tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lamina.core.values import number, whole_number
from lamina.data.corpus import SingleCorpus
from lamina.data.sources.file_documents import Document

_PIECES_WANTED = 400
_SMALLEST_PIECE = 1024
_LARGEST_PIECE = 64 * 1024
_PIECES_AT_LEAST = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The part of a document that lies in one piece of the corpus. A piece is held out as a whole or not at all.

    ``document`` and ``piece`` count from 0. ``start`` is the position of the first character in the document.
    """

    text: str
    document: int
    start: int
    piece: int

    @property
    def begin(self) -> tuple[int, int]:
        return self.document, self.start

    @property
    def end(self) -> tuple[int, int]:
        return self.document, self.start + len(self.text)


def piece_chars(total_chars: int) -> int:
    """Return the number of characters per piece, from 1,024 to 65,536. A short text has about 20 shorter pieces.

    Lamina cuts longer texts into about 400 pieces. More pieces make the held-out text more representative, and longer
    pieces keep more context.
    """
    size = min(max(total_chars // _PIECES_WANTED, _SMALLEST_PIECE), _LARGEST_PIECE)
    return max(1, min(size, total_chars // _PIECES_AT_LEAST))


def is_held_out(piece: int, eval_fraction: float) -> bool:
    """Return whether Lamina holds out the piece with this number. Held-out pieces are evenly spaced."""
    return math.floor((piece + 1) * eval_fraction + 0.5) > math.floor(piece * eval_fraction + 0.5)


@dataclass
class Splitter:
    """Cut documents into segments, one document after another.

    The four attributes are the complete state of a Splitter, from which a new Splitter can continue.
    """

    piece: int = 0  # the number of the current piece
    filled: int = 0  # the number of characters in the current piece so far
    document: int = -1  # the number of the last document
    position: int = 0  # the number of characters already cut from the last document

    def cut(self, document: Document, chars: int) -> Iterator[Segment]:
        """Yield the segments of the next document. Pieces have about ``chars`` characters and end at line ends."""
        if not document.continues:
            self.document, self.position = self.document + 1, 0
        text, start = document.text, 0
        while start < len(text):
            end = _cut(text, start, chars - self.filled, chars)
            segment = Segment(text=text[start:end], document=self.document, start=self.position, piece=self.piece)
            self.position += end - start
            self.filled += end - start
            if end < len(text) or 2 * self.filled >= chars:
                self.piece, self.filled = self.piece + 1, 0
            start = end
            yield segment


def _cut(text: str, start: int, room: int, chars: int) -> int:
    """Return where a segment from ``start`` ends. The current piece has room for ``room`` more characters."""
    full = start + room
    if len(text) <= full:
        return len(text)
    # at least half a piece, because a long line after a short line would make pieces of very different lengths
    earliest = start + max(0, room - chars // 2)
    ends = (text.rfind("\n", earliest, full), text.find("\n", full, full + chars), text.rfind(" ", earliest, full))
    return next((end + 1 for end in ends if end >= start), full)


def split_documents(documents: Iterable[Document], chars: int) -> Iterator[Segment]:
    """Yield the segments of documents in order. The segments contain the whole text."""
    splitter = Splitter()
    for document in documents:
        yield from splitter.cut(document, chars)


def whole_documents(documents: Iterable[Document], chars: int) -> Iterator[Segment]:
    """Yield each document as one segment, in the piece in which the document begins. Cut off a long file's end."""
    splitter = Splitter()
    for document in documents:
        first, *_ = splitter.cut(document, chars)
        if not document.continues:
            yield replace(first, text=document.text)


def count_chars(corpus: SingleCorpus) -> int:
    return sum(len(document.text) for document in corpus.documents())


def check_split(sequence_length: int, eval_fraction: float) -> None:
    whole_number("sequence_length", sequence_length, 2)
    number("eval_fraction", eval_fraction, 0, 0.5, open_low=True)
