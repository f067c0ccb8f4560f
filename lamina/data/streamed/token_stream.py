"""An endless stream of a corpus' token blocks that can start at any place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np

from lamina.data.encoding import Encoder, TokenJoiner
from lamina.data.sources.shards import Shard
from lamina.data.split import Segment, Splitter, is_held_out
from lamina.errors import UserError

_BATCH_CHARS = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a stream stands before a batch of text. All fields have JSON's types.

    Attributes:
        turn: how many times the corpus has been read to its end.
        shard: the index of the shard in this turn's order.
        position: where the shard's next document begins, as the shard itself encodes it; None for its beginning.
        split: the Splitter's fields before that document.
        segments: how many of that document's segments have been read.
        last: the document and the character at which the last packed segment ended (see TokenJoiner).
        carry: the tokens that do not fill a block yet.
        skip: how many of the blocks from here on have been handed out.
    """

    turn: int = 0
    shard: int = 0
    position: object = None
    split: Sequence[int] = dataclasses.astuple(Splitter())
    segments: int = 0
    last: Sequence[int] | None = None
    carry: Sequence[int] = ()
    skip: int = 0


class _Document(TypedDict):
    """The fields of a Place inside a shard."""

    position: object
    split: Sequence[int]
    segments: int


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The blocks of a corpus without its held-out pieces, endless, and the same each time from a Place on.

    A :class:`TokenJoiner` joins the segments. Tokens left over at the end of the corpus begin the first block of the
    next turn.

    Args:
        corpus: the name of the corpus, for errors.
        shards: the shards of the corpus, read one after the other.
        encoder: turns text into ids.
        sequence_length: tokens per block.
        chars: characters per piece.
        held_out: for each shard with held-out pieces, the number of pieces at its beginning that contains them.
        eval_fraction: the share of those pieces that is held out.
        seed: shuffles the shards in each turn; None keeps their order.
    """

    corpus: str
    shards: Sequence[Shard]
    encoder: Encoder
    sequence_length: int
    chars: int
    held_out: Mapping[int, int]
    eval_fraction: float
    seed: Sequence[int] | None

    def chunks(self, place: Place, size: int) -> Iterator[tuple[np.ndarray, Place]]:
        """Chunks of blocks [size, sequence_length] of the encoder's dtype, each with the place after it."""
        length = self.sequence_length
        carry, skip, before = np.array(place.carry, dtype=self.encoder.dtype), place.skip, place
        chunk, filled = np.empty((size, length), dtype=self.encoder.dtype), 0
        for after, ids in self._batches(place):
            ids = np.concatenate([carry, ids])
            whole = len(ids) // length
            rows, position = ids[: whole * length].reshape(whole, length), skip
            while position < whole:
                count = min(size - filled, whole - position)
                chunk[filled : filled + count] = rows[position : position + count]
                filled, position = filled + count, position + count
                if filled == size:
                    yield chunk, dataclasses.replace(before, carry=tuple(carry.tolist()), skip=position)
                    chunk, filled = np.empty_like(chunk), 0
            carry, skip, before = ids[whole * length :], 0, after

    def _batches(self, place: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """Tokens of about a million characters at a time, and the place after them (without carry and skip)."""
        turn, first = place.turn, place.shard
        joiner = TokenJoiner(self.encoder, None if place.last is None else cast("tuple[int, int]", tuple(place.last)))
        while True:
            order = self._order(turn)
            empty = not (first > 0 or place.position is not None or place.segments > 0)
            for index in range(first, len(order)):
                for document, segment in self._segments(order[index], place if index == first else Place()):
                    joiner.add(segment)
                    empty = False
                    if joiner.chars >= _BATCH_CHARS:
                        yield Place(turn=turn, shard=index, last=joiner.last, **document), joiner.encode()
                joiner.jump()
            if empty:
                raise UserError(f"corpus: {self.corpus!r} holds no text to train on (allowed: a corpus with some)")
            turn, first, place = turn + 1, 0, Place()
            if joiner.chars:
                yield Place(turn=turn, last=joiner.last), joiner.encode()

    def _segments(self, number: int, place: Place) -> Iterator[tuple[_Document, Segment]]:
        """The segments of a shard from a place on, without held-out ones, each with the place after it."""
        position, split, passed = place.position, tuple(place.split), place.segments
        limit, splitter = self.held_out.get(number, 0), Splitter(*split)
        for document, after in self.shards[number].read(position):
            for count, (segment, piece) in enumerate(splitter.cut(document, self.chars), start=1):
                if count <= passed or (piece < limit and is_held_out(number + piece, self.eval_fraction)):
                    continue
                yield {"position": position, "split": split, "segments": count}, segment
            position, split, passed = after, dataclasses.astuple(splitter), 0

    def _order(self, turn: int) -> list[int]:
        if self.seed is None:
            return list(range(len(self.shards)))
        return np.random.default_rng([*self.seed, turn]).permutation(len(self.shards)).tolist()
