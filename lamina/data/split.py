"""Which text is held out, decided on characters and before any tokenizer: every tokenizer sees the same split."""

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
    """A run of one document's text that lies in one piece.

    ``document`` numbers the documents of the corpus from 0, ``start`` counts characters from the document's beginning.
    """

    text: str
    document: int
    start: int
    held_out: bool

    @property
    def begin(self) -> tuple[int, int]:
        """Document and character at which the segment begins."""
        return self.document, self.start

    @property
    def end(self) -> tuple[int, int]:
        """Document and character at which a segment that continues this one begins."""
        return self.document, self.start + len(self.text)


def piece_chars(total_chars: int) -> int:
    """The length of a piece, in characters: 1 to 64 thousand, and so short that there are about 20 at the least.

    Many pieces make the held-out text representative, long ones keep its context whole; a few hundred give both.
    """
    wanted = min(max(total_chars // _PIECES_WANTED, _SMALLEST_PIECE), _LARGEST_PIECE)
    return max(1, min(wanted, total_chars // _PIECES_AT_LEAST))


def is_held_out(piece: int, eval_fraction: float) -> bool:
    """Whether the piece of this number is held out: evenly spread, the first one in the middle of its stretch."""
    return math.floor((piece + 1) * eval_fraction + 0.5) > math.floor(piece * eval_fraction + 0.5)


def split_documents(documents: Iterable[Document], chars: int, eval_fraction: float) -> Iterator[Segment]:
    """Cut documents into pieces of about ``chars`` characters and mark the held-out ones, in the corpus' order.

    Pieces end at line ends where there are any; short documents share a piece and stay whole. The segments' texts
    joined together are the corpus, character by character.
    """
    splitter = Splitter()
    for document in documents:
        for segment, piece in splitter.cut(document, chars):
            yield replace(segment, held_out=is_held_out(piece, eval_fraction))


@dataclass
class Splitter:
    """Where the cutting of a row of documents stands; between two documents this is all there is to know.

    ``piece``: the number of the piece that is being filled. ``filled``: its characters so far. ``document`` and
    ``position``: the number of the last document, and how many of its characters came so far.
    """

    piece: int = 0
    filled: int = 0
    document: int = -1
    position: int = 0

    def cut(self, document: Document, chars: int) -> Iterator[tuple[Segment, int]]:
        """The document's segments, each with the number of the piece that it lies in."""
        if not document.continues:
            self.document, self.position = self.document + 1, 0
        text, start = document.text, 0
        while start < len(text):
            end, piece = _cut(text, start, chars - self.filled, chars), self.piece
            made = Segment(text=text[start:end], document=self.document, start=self.position, held_out=False)
            self.position += end - start
            self.filled += end - start
            if end < len(text) or 2 * self.filled >= chars:
                self.piece, self.filled = self.piece + 1, 0
            start = end
            yield made, piece


def _cut(text: str, start: int, room: int, chars: int) -> int:
    """Where to end a segment that starts at ``start`` when ``room`` of the piece's ``chars`` characters are left."""
    full = start + room
    if len(text) <= full:
        return len(text)
    # no less than half a piece, or a long line after a short one would make pieces of very different lengths
    earliest = start + max(0, room - chars // 2)
    if (cut := text.rfind("\n", earliest, full) + 1) > start:
        return cut
    if (cut := text.find("\n", full, full + chars) + 1) > start:
        return cut
    if (cut := text.rfind(" ", earliest, full) + 1) > start:
        return cut
    return full


def split_corpus(corpus: SingleCorpus, chars: int, eval_fraction: float) -> Iterator[Segment]:
    """The segments of a corpus, see :func:`split_documents`."""
    return split_documents(corpus.documents(), chars, eval_fraction)


def count_chars(corpus: SingleCorpus) -> int:
    """The characters of a corpus, by reading it once: pieces are sized before the first one is cut."""
    return sum(len(document.text) for document in corpus.documents())


def check_split(sequence_length: int, eval_fraction: float) -> None:
    """Raise UserError for a length of blocks or a held-out share out of range."""
    whole_number("sequence_length", sequence_length, 2)
    number("eval_fraction", eval_fraction, 0, 0.5, open_low=True)
