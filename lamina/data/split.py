"""The held-out part of a text. Lamina cuts the text by characters, so every tokenizer has the same held-out part."""

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
    """The part of a document's text that lies in one piece.

    ``document`` and ``piece`` are numbers from 0. ``start`` counts characters from the beginning of the document.
    """

    text: str
    document: int
    start: int
    piece: int

    @property
    def begin(self) -> tuple[int, int]:
        """The document and the character at which the segment begins."""
        return self.document, self.start

    @property
    def end(self) -> tuple[int, int]:
        """The document and the character after the segment's last character."""
        return self.document, self.start + len(self.text)


def piece_chars(total_chars: int) -> int:
    """Return the characters per piece: 1,024 to 65,536, or fewer if a short text would have less than about 20 pieces.

    Many pieces make the held-out text representative, and long pieces keep more context. So Lamina aims at a few
    hundred pieces.
    """
    size = min(max(total_chars // _PIECES_WANTED, _SMALLEST_PIECE), _LARGEST_PIECE)
    return max(1, min(size, total_chars // _PIECES_AT_LEAST))


def is_held_out(piece: int, eval_fraction: float) -> bool:
    """Return whether the piece with this number is held out.

    Held-out pieces are evenly spread. The first is in the middle of the first 1 / ``eval_fraction`` pieces.
    """
    return math.floor((piece + 1) * eval_fraction + 0.5) > math.floor(piece * eval_fraction + 0.5)


@dataclass
class Splitter:
    """Cuts documents into segments, one document after another.

    Between two documents, the Splitter's fields are its whole state.

    Attributes:
        piece: the number of the current piece.
        filled: the number of characters in the current piece so far.
        document: the number of the last document.
        position: the number of characters already cut from the last document.
    """

    piece: int = 0
    filled: int = 0
    document: int = -1
    position: int = 0

    def cut(self, document: Document, chars: int) -> Iterator[Segment]:
        """Yield the segments of the next document, in pieces of about ``chars`` characters.

        A piece ends at the end of a line if possible. Short documents share a piece and stay whole.
        """
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
    """Return the end of the segment that begins at ``start``. The piece of ``chars`` characters has ``room`` left."""
    full = start + room
    if len(text) <= full:
        return len(text)
    # at least half a piece: otherwise a long line after a short one makes pieces of very different lengths
    earliest = start + max(0, room - chars // 2)
    ends = (text.rfind("\n", earliest, full), text.find("\n", full, full + chars), text.rfind(" ", earliest, full))
    return next((end + 1 for end in ends if end >= start), full)


def split_documents(documents: Iterable[Document], chars: int) -> Iterator[Segment]:
    """Yield the segments of a corpus's documents in order; the joined segments are the corpus's text."""
    splitter = Splitter()
    for document in documents:
        yield from splitter.cut(document, chars)


def whole_documents(documents: Iterable[Document], chars: int) -> Iterator[Segment]:
    """Yield each document whole, as a segment of the piece in which the document begins.

    If a long file comes in several parts, yield only the first part.
    """
    splitter = Splitter()
    for document in documents:
        first, *_ = splitter.cut(document, chars)
        if not document.continues:
            yield replace(first, text=document.text)


def count_chars(corpus: SingleCorpus) -> int:
    """Read a whole corpus, and count the characters. The number of characters decides the length of a piece."""
    return sum(len(document.text) for document in corpus.documents())


def check_split(sequence_length: int, eval_fraction: float) -> None:
    """Raise UserError if a block's length or the held-out share is out of range."""
    whole_number("sequence_length", sequence_length, 2)
    number("eval_fraction", eval_fraction, 0, 0.5, open_low=True)
