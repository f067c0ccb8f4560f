"""Read a corpus during training. Lamina holds out text from the beginnings of the files, and streams the rest."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from lamina.core.json_types import Json
from lamina.data.blocks import (
    ArrayBlocks,
    Blocks,
    BlockSource,
    BlockStats,
    TokenBlock,
    mix,
    unigram_entropy,
)
from lamina.data.corpus import EMBEDDED, Corpus, Shard, Shards
from lamina.data.encoding import TextEncoder, TokenJoiner
from lamina.data.split import Segment, Splitter, check_split, is_held_out, piece_chars, split_documents
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, is_trained, load_tokenizer
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SCANNED = 64 * 2**20  # the number of characters over which the held-out text is spread
_SHARDS = 64  # the number of shards over which the held-out text is spread
_PIECES, _SMALLEST_PIECE, _CHARS_PER_TOKEN = 64, 1024, 4
_BATCH_CHARS = 1024 * 1024
logger = logging.getLogger(__name__)

_CHUNK = 1024  # the minimum number of blocks that Lamina reads at once
_ANCHORS = 64  # the number of chunks that a reader can go back without starting over
_ENDLESS = 2**40
_READING: weakref.WeakSet[StreamedBlocks] = weakref.WeakSet()
SHUFFLE_BUFFER = 2048
# increase this version whenever the same corpus and settings would give other blocks
_FORMAT = "stream-1"
_EVAL_BLOCKS, _FEWEST = 1000, 64  # the default and the minimum number of held-out blocks


def stream_blocks(
    corpus: str = EMBEDDED,
    tokenizer_spec: str = BYTES,
    sequence_length: int = 256,
    *,
    eval_fraction: float = EVAL_FRACTION,
    eval_blocks: int = 0,
    text_field: str = "text",
    buffer: int = SHUFFLE_BUFFER,
    seed: int = 0,
) -> tuple[Blocks, PreTrainedTokenizerFast]:
    """Return blocks that Lamina reads from a corpus during training. The training split never ends.

    Lamina holds out pieces from the beginnings of up to 64 files, and never trains on these pieces. Lamina computes
    ``stats.unigram_entropy`` on the held-out pieces, with the token frequencies of the training text between the
    pieces. ``stats.train_tokens``, ``train_bytes`` and ``documents`` are 0, because Lamina does not know these numbers.

    For the errors and all other arguments, see :func:`lamina.data.packed.prepare_blocks`.

    Args:
        tokenizer_spec: ``bytes``, or a tokenizer of transformers. ``bpe:SIZE`` raises UserError, because a BPE
            tokenizer is trained on the whole corpus first.
        eval_fraction: the maximum fraction to hold out of the text at the beginnings of the files.
        eval_blocks: the number of blocks to hold out, at least 64 (0: 1,000 blocks).
        buffer: the number of consecutive blocks that Lamina shuffles together. 1 keeps the order of the corpus.
    """
    check_split(sequence_length, eval_fraction)
    if is_trained(tokenizer_spec):
        raise UserError(
            f"tokenizer: {tokenizer_spec!r} needs the whole corpus, but --streaming reads the corpus in parts. Give "
            "bytes, a transformers tokenizer, or the folder model/ of a run on a part of the corpus."
        )
    text = Corpus.parse(corpus, text_field)
    tokenizer = load_tokenizer(tokenizer_spec)
    encoder, wanted = TextEncoder(tokenizer), max(eval_blocks or _EVAL_BLOCKS, _FEWEST)
    blocks = []
    for number, part in enumerate(text.parts):
        shards, order = part.corpus.shards(), None if buffer == 1 else (seed, number)
        apart = hold_out(part.corpus.spec, shards, encoder, sequence_length, blocks=wanted, eval_fraction=eval_fraction)
        facts = (_FORMAT, shards.fingerprint, encoder.content_hash(), sequence_length, repr(eval_fraction), wanted)
        held_out, known = apart.held_out.blocks(sequence_length), apart.known.blocks(sequence_length)
        stats = apart.stats(held_out, known, hashlib.sha256("|".join(map(str, facts)).encode()).hexdigest())
        stream = TokenStream(
            corpus=part.corpus.spec,
            shards=shards.shards,
            encoder=encoder,
            sequence_length=sequence_length,
            chars=apart.chars,
            held_out=apart.limits,
            eval_fraction=apart.fraction,
            seed=order,
        )
        train = StreamedBlocks(stream, buffer=buffer, seed=order or (0, 0), known=known)
        blocks.append(Blocks(train=train, eval=ArrayBlocks(held_out), stats=stats))
    return mix(text.parts, blocks), tokenizer


@dataclass
class Excerpt:
    """The token ids of a part of a corpus, grouped by the corpus's shards (such as files)."""

    encoder: TextEncoder
    ids: dict[int, list[np.ndarray]] = field(default_factory=dict)
    tokens: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        # an end-of-text token begins every shard, because the first shard is known only at the end
        self._joiner = TokenJoiner(self.encoder, TokenJoiner.ELSEWHERE)
        self._shard: int | None = None

    def add(self, shard: int, segment: Segment) -> None:
        if shard != self._shard:
            self._joiner.jump()
        self._shard = shard
        self._joiner.add(segment)
        ids = self._joiner.encode()
        self.ids.setdefault(shard, []).append(ids)
        self.tokens += len(ids)
        self.bytes += len(segment.text.encode())

    def blocks(self, sequence_length: int) -> np.ndarray:
        """Return the token ids in the order of the shards, [blocks, sequence_length]."""
        rows = [ids for shard in sorted(self.ids) for ids in self.ids[shard]]
        ids = np.concatenate(rows)[1:] if rows else np.empty(0, dtype=self.encoder.dtype)
        whole = len(ids) // sequence_length
        return ids[: whole * sequence_length].reshape(whole, sequence_length)


@dataclass
class Division:
    """The division of a streamed corpus into training text and held-out text."""

    chars: int  # the number of characters per piece
    fraction: float  # the held-out fraction of the pieces that Lamina has read
    held_out: Excerpt
    known: Excerpt  # the training text between the held-out pieces
    # for each shard, the number of pieces up to the last held-out piece
    limits: dict[int, int] = field(default_factory=dict)

    def stats(self, held_out: np.ndarray, known: np.ndarray, fingerprint: str) -> BlockStats:
        vocab_size = self.held_out.encoder.vocab_size
        return BlockStats(
            train_tokens=0,
            eval_tokens=held_out.size,
            train_bytes=0,
            eval_bytes=round(self.held_out.bytes * held_out.size / self.held_out.tokens),
            unigram_entropy=unigram_entropy(known, held_out, vocab_size),
            vocab_size=vocab_size,
            sequence_length=held_out.shape[1],
            documents=0,
            fingerprint=fingerprint,
        )


def hold_out(
    corpus: str, shards: Shards, encoder: TextEncoder, sequence_length: int, *, blocks: int, eval_fraction: float
) -> Division:
    """Hold out pieces of text to fill ``blocks`` blocks, but at most the fraction ``eval_fraction`` of the text.

    If a split gets no block, Lamina doubles the fraction, up to 0.5. Raises UserError if the text is too short for one
    training block and one held-out block.
    """
    needed = blocks * sequence_length * _CHARS_PER_TOKEN
    total = _SCANNED if shards.bytes is None else max(1, shards.bytes)
    chars = min(piece_chars(total), max(_SMALLEST_PIECE, needed // _PIECES))
    fraction = min(eval_fraction, needed / min(total, _SCANNED))
    while True:
        division = Division(chars, fraction, Excerpt(encoder), Excerpt(encoder))
        held_out, rest = division.held_out, division.known
        for shard, segment in _pieces(shards, division, blocks, sequence_length):
            if is_held_out(shard + segment.piece, fraction):
                held_out.add(shard, segment)
                division.limits[shard] = segment.piece + 1
            elif rest.tokens < max(2 * held_out.tokens, sequence_length + 1):
                rest.add(shard, segment)
        if len(held_out.blocks(sequence_length)) and len(rest.blocks(sequence_length)):
            return division
        if not held_out.tokens and not rest.tokens:
            raise UserError(f"corpus: {corpus!r} holds no text")
        if fraction >= 0.5:
            raise UserError(
                f"corpus: {corpus!r} has about {held_out.tokens + rest.tokens} tokens, too few for a sequence_length "
                f"of {sequence_length}. Give a longer text, or lower sequence_length."
            )
        fraction = min(0.5, 2 * fraction)


def _pieces(shards: Shards, division: Division, blocks: int, sequence_length: int) -> Iterator[tuple[int, Segment]]:
    """Yield segments of text with their shards, until enough text is held out. Up to 64 shards contribute equally."""
    count = len(shards.shards)
    per_shard = math.ceil(blocks / min(count, _SHARDS)) * sequence_length if count else 0
    for shard in np.random.default_rng(0).permutation(count).tolist():
        before = division.held_out.tokens
        if before > blocks * sequence_length:
            return
        for segment in split_documents((document for document, _ in shards.shards[shard].read()), division.chars):
            if division.held_out.tokens - before > per_shard and segment.piece >= division.limits[shard]:
                break
            yield shard, segment


@dataclass(frozen=True, kw_only=True)
class Place:
    """A position in a stream, which a checkpoint can store as JSON."""

    turn: int = 0  # the number of times that Lamina has read the corpus to its end
    shard: int = 0  # the index of the current shard in the current epoch's order
    position: object = None  # the position of the current document in the shard, or None at the shard's beginning
    split: Sequence[int] = dataclasses.astuple(Splitter())  # the Splitter's state before the current document
    segments: int = 0  # the number of segments that Lamina has read from the current document
    # the document and the character at which the last segment ended (see ``TokenJoiner``)
    last: Sequence[int] | None = None
    carry: Sequence[int] = ()  # the tokens that do not fill a block yet
    skip: int = 0  # the number of blocks after this position that the stream has already returned


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """An endless stream of a corpus's blocks, without the held-out pieces. The stream can start at any position.

    Tokens left over at the end of the corpus begin the first block of the next epoch.
    """

    corpus: str
    shards: Sequence[Shard]
    encoder: TextEncoder
    sequence_length: int
    chars: int  # the number of characters per piece
    held_out: Mapping[int, int]  # for each shard, the number of pieces up to the last held-out piece
    eval_fraction: float  # the held-out fraction of the pieces in ``held_out``
    seed: Sequence[int] | None  # the seed that shuffles the shards in each epoch, or None to keep the shards' order

    def chunks(self, place: Place, size: int) -> Iterator[tuple[np.ndarray, Place]]:
        """Yield arrays of ``size`` blocks, [size, sequence_length], each with the position after the array."""
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
        """Yield the tokens of about a million characters, and the Place after these tokens, without carry and skip."""
        turn, first = place.turn, place.shard
        joiner = TokenJoiner(self.encoder, None if place.last is None else cast("tuple[int, int]", tuple(place.last)))
        while True:
            order = list(range(len(self.shards)))
            if self.seed is not None:
                order = np.random.default_rng([*self.seed, turn]).permutation(len(self.shards)).tolist()
            empty = not (first > 0 or place.position is not None or place.segments > 0)
            for index in range(first, len(order)):
                for where, segment in self._segments(order[index], place if index == first else Place()):
                    joiner.add(segment)
                    empty = False
                    if joiner.chars >= _BATCH_CHARS:
                        position, split, segments = where
                        after = Place(turn=turn, shard=index, position=position, split=split, segments=segments)
                        yield dataclasses.replace(after, last=joiner.last), joiner.encode()
                joiner.jump()
            if empty:
                raise UserError(f"corpus: {self.corpus!r} holds no text to train on. Choose a corpus with text.")
            turn, first, place = turn + 1, 0, Place()
            if joiner.chars:
                yield Place(turn=turn, last=joiner.last), joiner.encode()

    def _segments(self, number: int, place: Place) -> Iterator[tuple[tuple[object, Sequence[int], int], Segment]]:
        """Yield a shard's training segments after ``place``, each with the position, split and segments that follow."""
        position, split, passed = place.position, tuple(place.split), place.segments
        limit, splitter = self.held_out.get(number, 0), Splitter(*split)
        for document, after in self.shards[number].read(position):
            for count, segment in enumerate(splitter.cut(document, self.chars), start=1):
                apart = segment.piece < limit and is_held_out(number + segment.piece, self.eval_fraction)
                if count > passed and not apart:
                    yield (position, split, count), segment
            position, split, passed = after, dataclasses.astuple(splitter), 0


class StreamedBlocks(BlockSource):
    """The numbered blocks of a stream. Item ``i`` is the i-th block of the run. A run must read the blocks in order.

    Lamina shuffles each group of ``buffer`` consecutive blocks. The order depends only on the seed and the group's
    number. A thread reads the next blocks in advance.

    Args:
        buffer: the number of consecutive blocks that Lamina shuffles together. 1 keeps the order.
        known: a sample of the corpus's blocks, [blocks, sequence_length].
    """

    in_order = True

    def __init__(self, stream: TokenStream, *, buffer: int, seed: Sequence[int], known: np.ndarray):
        self.stream, self.buffer, self.seed, self._known = stream, buffer, seed, known
        self.size = buffer * math.ceil(_CHUNK / buffer)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._reader: ThreadPoolExecutor | None = None
        _READING.add(self)
        self.load_state_dict(None)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> TokenBlock:
        group, number = divmod(index, self.buffer)
        if self._order[0] != group:
            self._order = (group, np.random.default_rng([*self.seed, group]).permutation(self.buffer))
        chunk, row = divmod(group * self.buffer + int(self._order[1][number]), self.size)
        ids = torch.from_numpy(self._chunk(chunk)[row].astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    @property
    def known(self) -> np.ndarray:
        return self._known

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
                    "corpus %s ends between blocks %d and %d of this run. After the end, Lamina reads the corpus again",
                    *(self.stream.corpus, self._next * self.size, (self._next + 1) * self.size - 1),
                )
            self._held, self._next = (self._next, chunk), self._next + 1
            self._anchors[self._next] = after
            self._anchors.pop(self._next - _ANCHORS if self._next > _ANCHORS else -1, None)
        self._reader = self._reader or ThreadPoolExecutor(1, thread_name_prefix="lamina-stream")
        self._coming = self._reader.submit(next, self._chunks)
        return self._held[1]

    def _drop(self) -> None:
        """Discard all blocks in memory, and wait for the thread that reads the next blocks."""
        if (coming := getattr(self, "_coming", None)) is not None and not coming.cancel():
            coming.exception()
        self._held: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._chunks: Iterator[tuple[np.ndarray, Place]] | None = None
        self._coming: Future[tuple[np.ndarray, Place]] | None = None
        self._next = 0


@atexit.register
def _stop_reading() -> None:
    """Close all files at exit, before Python unloads the modules that Lamina needs to close files."""
    for blocks in list(_READING):
        blocks._drop()
