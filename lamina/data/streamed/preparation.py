"""A corpus to train on while it is read: what is held out is looked for first, in a bounded part of the text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.data.blocks import Blocks, BlockStats, PackedBlocks, check_lengths
from lamina.data.corpus import EMBEDDED, validate_corpus
from lamina.data.encoding import Encoder
from lamina.data.mix import parse_mix
from lamina.data.mixed_blocks import mix
from lamina.data.packed.packing import unigram_entropy
from lamina.data.sources.shards import Shards, open_shards
from lamina.data.split import Segment, Splitter, is_held_out, piece_chars
from lamina.data.streamed.stream import Batch, StreamedBlocks, TokenStream
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, load_tokenizer
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHUFFLE_BUFFER = 2048
# goes up whenever the same corpus and settings would give other blocks
_FORMAT = "stream-1"
_EVAL_BLOCKS, _FEWEST = 1000, 64  # held out where all are evaluated; at the least
_LOOKED_THROUGH = 64 * 2**20  # characters that what is held out is spread over
_SHARDS = 64  # and shards
_PIECES, _SMALLEST_PIECE, _CHARS_A_TOKEN = 64, 1024, 4


class ArrayBlocks(PackedBlocks):
    """Token blocks in memory, [num_blocks, sequence_length]."""

    def __init__(self, array: np.ndarray):
        self.shape, self._array = array.shape, array

    @property
    def array(self) -> np.ndarray:
        assert self._array is not None
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


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
    """The blocks of ``lamina.data.prepare_blocks`` without preparing them: ``train`` is a StreamedBlocks without end.

    Held out are pieces from the beginnings of up to 64 files, spread over 64 million characters, as many as fill
    ``eval_blocks``; they are never trained on. The unigram entropy is the cross-entropy of these under twice as
    much text from between them. ``stats.train_tokens``, ``train_bytes`` and ``documents`` are 0: nobody counted them.

    Args:
        corpus: see :func:`lamina.data.read_corpus`; or a mix of them.
        tokenizer_spec: ``bytes``, or a tokenizer of transformers: a ``bpe:SIZE`` would have to read the corpus first.
        sequence_length: tokens a block.
        eval_fraction: the share of the text looked through that is held out, at the most.
        eval_blocks: how many blocks to hold out, 64 at the least; 0 for 1,000.
        text_field: the field of rows that holds the text.
        buffer: how many consecutive blocks are shuffled among themselves; 1 to leave all in the corpus' order.
        seed: of the order.

    Raises:
        UserError: the corpus is missing, empty, binary or shorter than a block a split; an argument is out of range.
    """
    check_lengths(sequence_length, eval_fraction)
    if tokenizer_spec == "bpe" or tokenizer_spec.startswith("bpe:"):
        raise UserError(
            f"--tokenizer {tokenizer_spec!r} is trained on the whole corpus first (allowed with --streaming: bytes, or "
            "a tokenizer of transformers by folder or name, such as the model/ of a run on a part of the corpus)"
        )
    parts = parse_mix(corpus)
    for part in parts:
        validate_corpus(part.corpus)  # all of them before the first is read
    tokenizer = load_tokenizer(tokenizer_spec)
    encoder, wanted = Encoder(tokenizer), max(eval_blocks or _EVAL_BLOCKS, _FEWEST)

    def one(name: str, number: int) -> Blocks:
        order = None if buffer == 1 else (seed, number)
        return _streamed(name, encoder, sequence_length, wanted, eval_fraction, text_field, buffer, order)

    if not parts:
        return one(corpus, 0), tokenizer
    return mix(parts, [one(part.corpus, number) for number, part in enumerate(parts)]), tokenizer


def _streamed(
    corpus: str,
    encoder: Encoder,
    sequence_length: int,
    wanted: int,
    eval_fraction: float,
    text_field: str,
    buffer: int,
    seed: tuple[int, int] | None,
) -> Blocks:
    found = open_shards(corpus, text_field)
    look = _look_through(corpus, found, encoder, sequence_length, wanted, eval_fraction)
    held_out, sample = look.held_out.blocks(sequence_length), look.sample.blocks(sequence_length)
    stream = TokenStream(
        corpus=corpus,
        shards=found.shards,
        encoder=encoder,
        sequence_length=sequence_length,
        chars=look.chars,
        held_out=look.limits,
        eval_fraction=look.fraction,
        seed=seed,
    )
    told = f"{_FORMAT}|{found.fingerprint}|{encoder.content_hash()}|{sequence_length}|{eval_fraction!r}|{wanted}"
    stats = BlockStats(
        train_tokens=0,
        eval_tokens=held_out.size,
        train_bytes=0,
        eval_bytes=round(look.held_out.bytes * held_out.size / look.held_out.tokens),
        unigram_entropy=unigram_entropy(sample, held_out, encoder.vocab_size),
        vocab_size=encoder.vocab_size,
        sequence_length=sequence_length,
        documents=0,
        fingerprint=hashlib.sha256(told.encode()).hexdigest(),
    )
    train = StreamedBlocks(stream, buffer=buffer, seed=seed or (0, 0), sample=sample)
    return Blocks(train=train, eval=ArrayBlocks(held_out), stats=stats)  # type: ignore[arg-type]


@dataclass
class _Text:
    """Some of a corpus' segments, by shard, as ids."""

    encoder: Encoder
    ids: dict[int, list[np.ndarray]] = field(default_factory=dict)
    tokens: int = 0
    bytes: int = 0
    last: tuple[int, Segment] | None = None

    def add(self, shard: int, segment: Segment) -> None:
        batch = Batch(self.encoder)
        same = self.last is not None and self.last[0] == shard
        # the first of a shard has its end-of-text token, too: which shard it comes after is only known at the end
        batch.add(segment.text, jump=not (same and self.last is not None and segment.follows(self.last[1])))
        ids, self.last = batch.encode(), (shard, segment)
        self.ids.setdefault(shard, []).append(ids)
        self.tokens += len(ids)
        self.bytes += len(segment.text.encode())

    def blocks(self, sequence_length: int) -> np.ndarray:
        """[blocks, sequence_length], in the shards' order, without the end-of-text token at the very beginning."""
        rows = [ids for shard in sorted(self.ids) for ids in self.ids[shard]]
        ids = np.concatenate(rows)[1:] if rows else np.empty(0, dtype=self.encoder.dtype)
        whole = len(ids) // sequence_length
        return ids[: whole * sequence_length].reshape(whole, sequence_length)


@dataclass
class _Look:
    """What was found: ``limits`` gives, of each shard with something held out, the number of pieces looked at."""

    chars: int
    fraction: float
    held_out: _Text
    sample: _Text
    limits: dict[int, int] = field(default_factory=dict)


def _look_through(
    corpus: str, found: Shards, encoder: Encoder, sequence_length: int, wanted: int, eval_fraction: float
) -> _Look:
    needed = wanted * sequence_length * _CHARS_A_TOKEN
    total = _LOOKED_THROUGH if found.bytes is None else max(1, found.bytes)
    chars = min(piece_chars(total), max(_SMALLEST_PIECE, needed // _PIECES))
    fraction = min(eval_fraction, needed / min(total, _LOOKED_THROUGH))
    while True:
        look = _Look(chars, fraction, _Text(encoder), _Text(encoder))
        for shard, segment, piece in _pieces(found, look, wanted, sequence_length):
            if is_held_out(shard + piece, fraction):
                look.held_out.add(shard, segment)
                look.limits[shard] = piece + 1
            elif look.sample.tokens < max(2 * look.held_out.tokens, sequence_length + 1):
                look.sample.add(shard, segment)
        if len(look.held_out.blocks(sequence_length)) and len(look.sample.blocks(sequence_length)):
            return look
        if not look.held_out.tokens and not look.sample.tokens:
            raise UserError(f"--corpus {corpus!r} holds no text")
        if fraction >= 0.5:
            raise UserError(
                f"--corpus {corpus!r} has about {look.held_out.tokens + look.sample.tokens} tokens, too few for "
                f"--sequence-length {sequence_length}: one block to train on and one held out are needed"
            )
        fraction = min(0.5, 2 * fraction)


def _pieces(found: Shards, look: _Look, wanted: int, sequence_length: int) -> Iterator[tuple[int, Segment, int]]:
    """Shard, segment and number of the piece in it, until enough is held out: a like part of each of some shards."""
    share = math.ceil(wanted / min(len(found.shards), _SHARDS)) * sequence_length if found.shards else 0
    for shard in np.random.default_rng(0).permutation(len(found.shards)).tolist():
        before = look.held_out.tokens
        if before > wanted * sequence_length:
            return
        splitter = Splitter()
        for document, _ in found.shards[shard].read():
            for segment, piece in splitter.cut(document, look.chars):
                if look.held_out.tokens - before > share and piece >= look.limits[shard]:
                    break
                yield shard, segment, piece
            else:
                continue
            break
