"""The blocks of a token stream by number, shuffled within a buffer; reading can resume at any block."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np
import torch

from lamina.core.json_types import Json
from lamina.data.blocks import Block, BlockSource, spread
from lamina.data.streamed.token_stream import Place, TokenStream
from lamina.data.token_counts import count_tokens

logger = logging.getLogger(__name__)

_CHUNK = 1024  # the least number of blocks read at a time
_ANCHORS = 64  # how many chunks a reader can go back without starting over
_ENDLESS = 2**40
_READING: weakref.WeakSet[StreamedBlocks] = weakref.WeakSet()


class StreamedBlocks(BlockSource):
    """The blocks of a stream by number, requested in increasing order; item ``i`` is the i-th block of a run.

    Each group of ``buffer`` consecutive blocks is shuffled; the seed and the group's number alone decide how. One chunk
    of blocks is in memory while a thread reads the next. The Places of the last chunks are stored, so ``state_dict``
    has one at or shortly before any block that training has reached.

    Args:
        stream: the stream of the corpus.
        buffer: how many consecutive blocks are shuffled among themselves; 1 for none.
        seed: the seed of the shuffles.
        known: some of the corpus' text, [blocks, sequence_length]; ``sample`` and ``token_counts`` use it.
    """

    in_order = True

    def __init__(self, stream: TokenStream, *, buffer: int, seed: Sequence[int], known: np.ndarray):
        self.stream, self.buffer, self.seed, self.known = stream, buffer, seed, known
        self.size = buffer * math.ceil(_CHUNK / buffer)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._reader: ThreadPoolExecutor | None = None
        _READING.add(self)
        self.load_state_dict(None)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Block:
        group, place = divmod(index, self.buffer)
        if self._order[0] != group:
            self._order = (group, np.random.default_rng([*self.seed, group]).permutation(self.buffer))
        chunk, row = divmod(group * self.buffer + int(self._order[1][place]), self.size)
        ids = torch.from_numpy(self._chunk(chunk)[row].astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def sample(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.known[spread(len(self.known), count)].astype(np.int64))

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return count_tokens(self.known, vocab_size)

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        return self.known

    def state_dict(self, index: int) -> Json:
        chunk = max(anchor for anchor in self._anchors if anchor <= index // self.size)
        return {"size": self.size, "chunk": chunk, **dataclasses.asdict(self._anchors[chunk])}

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        self._drop()
        self.verbose = verbose
        self._anchors = {0: Place()}
        if state is not None and (stored := cast("Json", state))["size"] == self.size:
            place = {name: value for name, value in stored.items() if name not in ("size", "chunk")}
            self._anchors[stored["chunk"]] = Place(**place)

    def _chunk(self, number: int) -> np.ndarray:
        if self._held[0] == number:
            return self._held[1]
        if self._chunks is None or number < self._next:
            self._drop()
            self._next = max(anchor for anchor in self._anchors if anchor <= number)
            self._chunks = self.stream.chunks(self._anchors[self._next], self.size)
        while self._next <= number:
            chunk, after = next(self._chunks) if self._coming is None else self._coming.result()
            self._coming = None
            if self.verbose and self._anchors[self._next].turn == 0 < after.turn:
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
        """Forget all chunks. Waits for one that is being read, because its generator is in use."""
        if (coming := getattr(self, "_coming", None)) is not None and not coming.cancel():
            coming.exception()
        self._held: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._chunks: Iterator[tuple[np.ndarray, Place]] | None = None
        self._coming: Future[tuple[np.ndarray, Place]] | None = None
        self._next = 0


@atexit.register
def _stop_reading() -> None:
    """Close all files while the modules that close them still exist."""
    for blocks in list(_READING):
        blocks._drop()
