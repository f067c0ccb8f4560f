"""Blocks read, tokenised and packed while training goes on, in an order that can be taken up at any block."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lamina.data.encoding import Encoder
from lamina.data.sources.shards import Shard
from lamina.data.split import Splitter, is_held_out
from lamina.errors import UserError

logger = logging.getLogger(__name__)

_BATCH_CHARS = 1024 * 1024
_CHUNK = 1024  # blocks read at a time, at the least
_ANCHORS = 64  # chunks back to which a reader can return without starting over
_ENDLESS = 2**40
_READING: weakref.WeakSet[StreamedBlocks] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a stream stands before a batch of text, of JSON's types all through.

    Attributes:
        turn: how often the corpus was read to its end.
        shard: in the turn's order.
        position: of the shard's next document, as the shard gave it; None for its beginning.
        split: the Splitter's fields before that document.
        segments: how many of that document's segments are read already.
        last: document and end of the last segment that was packed, to see where the text jumps.
        carry: the tokens that did not fill a block yet.
        skip: how many of the blocks from here on were handed out before.
    """

    turn: int = 0
    shard: int = 0
    position: Any = None
    split: Sequence[int] = dataclasses.astuple(Splitter())
    segments: int = 0
    last: Sequence[int] | None = None
    carry: Sequence[int] = ()
    skip: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """A corpus without its held-out pieces as blocks without end, always the same ones from a Place on.

    Packed as ``lamina.data.packed.packing`` does it: an end-of-text token stands between documents and wherever a
    piece is missing. What does not fill a block at the corpus' end begins the first block of the next turn.

    Args:
        corpus: its name, for errors.
        shards: read one after the other.
        encoder: gives the ids.
        sequence_length: tokens in a block.
        chars: characters in a piece.
        held_out: of each shard that has any, the number of pieces at its beginning among which some are held out.
        eval_fraction: the share of those that is.
        seed: shuffles the shards anew in each turn; None for their own order.
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
        """Blocks from a place on, [size, sequence_length] of the encoder's dtype, and the place behind them."""
        length = self.sequence_length
        carry, skip, before = np.array(place.carry, dtype=self.encoder.dtype), place.skip, place
        chunk, filled = np.empty((size, length), dtype=self.encoder.dtype), 0
        for after, ids in self._batches(place):
            ids = np.concatenate([carry, ids])
            whole = len(ids) // length
            rows, taken = ids[: whole * length].reshape(whole, length), skip
            while taken < whole:
                count = min(size - filled, whole - taken)
                chunk[filled : filled + count] = rows[taken : taken + count]
                filled, taken = filled + count, taken + count
                if filled == size:
                    yield chunk, dataclasses.replace(before, carry=tuple(carry.tolist()), skip=taken)
                    chunk, filled = np.empty_like(chunk), 0
            carry, skip, before = ids[whole * length :], 0, after

    def _batches(self, place: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """Tokens of about a million characters at a time, and the place behind them (without carry and skip)."""
        turn, first, position, segments = place.turn, place.shard, place.position, place.segments
        split, last = tuple(place.split), None if place.last is None else tuple(place.last)
        batch = Batch(self.encoder)
        while True:
            order, text = self._order(turn), first > 0 or position is not None or segments > 0
            for index in range(first, len(order)):
                number = order[index]
                limit, splitter = self.held_out.get(number, 0), Splitter(*split)
                for document, after in self.shards[number].read(position):
                    for count, (segment, piece) in enumerate(splitter.cut(document, self.chars), start=1):
                        if count <= segments:
                            continue
                        if piece < limit and is_held_out(number + piece, self.eval_fraction):
                            continue
                        batch.add(segment.text, jump=last not in (None, (segment.document, segment.start)))
                        last, text = (segment.document, segment.start + len(segment.text)), True
                        if batch.chars >= _BATCH_CHARS:
                            here = Place(
                                turn=turn, shard=index, position=position, split=split, segments=count, last=last
                            )
                            yield here, batch.encode()
                    position, split, segments = after, dataclasses.astuple(splitter), 0
                position, split, segments = None, dataclasses.astuple(Splitter()), 0
                last = None if last is None else (-1, -1)  # nothing follows on the last shard's text
            if not text:
                raise UserError(f"--corpus {self.corpus!r} holds no text to train on (allowed: a corpus with some)")
            turn, first = turn + 1, 0
            if batch.chars:
                yield Place(turn=turn, last=last), batch.encode()

    def _order(self, turn: int) -> list[int]:
        if self.seed is None:
            return list(range(len(self.shards)))
        return np.random.default_rng([*self.seed, turn]).permutation(len(self.shards)).tolist()


class Batch:
    """Texts that become one row of ids, an end-of-text token before each that does not follow on the one before."""

    def __init__(self, encoder: Encoder):
        self.encoder, self.chars = encoder, 0
        self._end = np.array([encoder.tokenizer.eos_token_id], dtype=encoder.dtype)
        self._texts: list[str] = []
        self._jumps: list[bool] = []

    def add(self, text: str, *, jump: bool) -> None:
        """``jump``: an end-of-text token comes before it."""
        self._texts.append(text)
        self._jumps.append(jump)
        self.chars += len(text)

    def encode(self) -> np.ndarray:
        """The ids of all that was added, [tokens]; the batch is empty then."""
        parts = []
        for jump, ids in zip(self._jumps, self.encoder.encode(self._texts), strict=True):
            parts += [self._end, ids] if jump else [ids]
        self._texts, self._jumps, self.chars = [], [], 0
        return np.concatenate(parts) if parts else self._end[:0]


class StreamedBlocks(torch.utils.data.Dataset):
    """A stream's blocks by number, asked for in rising order; item ``i`` is the i-th block that a run trains on.

    Each ``buffer`` consecutive blocks are shuffled among themselves by the seed and their place alone. A chunk of
    blocks is in memory, and a thread reads the next one. A Place is kept for the last chunks, so that ``state_dict``
    has one at or shortly before any block that training has reached, and ``load_state_dict`` takes it up there.

    Args:
        stream: of the corpus.
        buffer: blocks shuffled among themselves; 1 for none.
        seed: of the shuffles.
        sample: some of the corpus' other text in blocks, [blocks, sequence_length].
    """

    def __init__(self, stream: TokenStream, *, buffer: int, seed: Sequence[int], sample: np.ndarray):
        self.stream, self.buffer, self.seed, self.sample = stream, buffer, seed, sample
        self.size = buffer * math.ceil(_CHUNK / buffer)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._reader: ThreadPoolExecutor | None = None
        _READING.add(self)
        self.load_state_dict(None)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        group, place = divmod(index, self.buffer)
        if self._order[0] != group:
            self._order = (group, np.random.default_rng([*self.seed, group]).permutation(self.buffer))
        chunk, row = divmod(group * self.buffer + int(self._order[1][place]), self.size)
        ids = torch.from_numpy(self._chunk(chunk)[row].astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def state_dict(self, index: int) -> dict[str, Any]:
        """Where to begin for block ``index`` and those after it; of JSON's types."""
        chunk = max(known for known in self._anchors if known <= index // self.size)
        return {"size": self.size, "chunk": chunk, **dataclasses.asdict(self._anchors[chunk])}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, tell: bool = True) -> None:
        """Begin where ``state_dict`` was; None for the beginning. ``tell``: log where the corpus is read again."""
        self._drop()
        self.tell = tell
        self._anchors = {0: Place()}
        if state is not None and state["size"] == self.size:
            place = {name: value for name, value in state.items() if name not in ("size", "chunk")}
            self._anchors[state["chunk"]] = Place(**place)

    def _chunk(self, number: int) -> np.ndarray:
        if self._held[0] == number:
            return self._held[1]
        if self._chunks is None or number < self._next:
            self._drop()
            self._next = max(known for known in self._anchors if known <= number)
            self._chunks = self.stream.chunks(self._anchors[self._next], self.size)
        while self._next <= number:
            chunk, after = next(self._chunks) if self._coming is None else self._coming.result()
            self._coming = None
            if self.tell and self._anchors[self._next].turn == 0 < after.turn:
                logger.warning(
                    "corpus %s ends within blocks %d to %d of this run; from there on it is read again",
                    *(self.stream.corpus, self._next * self.size, (self._next + 1) * self.size - 1),
                )
            self._held, self._next = (self._next, chunk), self._next + 1
            self._anchors[self._next] = after
            self._anchors.pop(self._next - _ANCHORS if self._next > _ANCHORS else -1, None)
        self._reader = self._reader or ThreadPoolExecutor(1, thread_name_prefix="lamina-stream")
        self._coming = self._reader.submit(next, self._chunks)
        return self._held[1]

    def _drop(self) -> None:
        """Forget what was read; a chunk that is being read is waited for, its generator being in use."""
        if (coming := getattr(self, "_coming", None)) is not None and not coming.cancel():
            coming.exception()
        self._held: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._chunks: Iterator[tuple[np.ndarray, Place]] | None = None
        self._coming: Future[tuple[np.ndarray, Place]] | None = None
        self._next = 0


@atexit.register
def _stop_reading() -> None:
    """Files are closed while what closes them is still there."""
    for blocks in list(_READING):
        blocks._drop()
