"""A corpus that is read while training goes on: the held-out text is chosen first, the rest becomes a stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.data.blocks import ArrayBlocks, Blocks, BlockStats
from lamina.data.corpus import EMBEDDED, Corpus, SingleCorpus
from lamina.data.encoding import Encoder
from lamina.data.mixed_blocks import mix
from lamina.data.split import check_split
from lamina.data.streamed.held_out import hold_out
from lamina.data.streamed.streamed_blocks import StreamedBlocks
from lamina.data.streamed.token_stream import TokenStream
from lamina.data.token_counts import unigram_entropy
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, is_trained, load_tokenizer
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHUFFLE_BUFFER = 2048
# increases whenever the same corpus and settings would give other blocks
_FORMAT = "stream-1"
_EVAL_BLOCKS, _FEWEST = 1000, 64  # held-out blocks: by default, at least


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
    """Blocks of a corpus without preparing them first: ``train`` is an endless :class:`StreamedBlocks`.

    The held-out pieces come from the beginnings of up to 64 files, spread over 64 million characters; there are as
    many as fill ``eval_blocks``. They are never trained on. The unigram entropy is their cross-entropy under twice as
    much text from between them. ``stats.train_tokens``, ``train_bytes`` and ``documents`` are 0 because unknown.

    Args:
        corpus: see :meth:`lamina.data.Corpus.parse`.
        tokenizer_spec: ``bytes``, or a tokenizer of transformers: a ``bpe:SIZE`` would have to read the corpus first.
        sequence_length: tokens per block.
        eval_fraction: the largest share of the scanned text to hold out.
        eval_blocks: how many blocks to hold out, at least 64; 0 for 1,000.
        text_field: the field of rows that holds the text.
        buffer: how many consecutive blocks are shuffled among themselves; 1 keeps the order of the corpus.
        seed: the seed of the order.

    Raises:
        UserError: the corpus is missing, empty, binary or too short for a block per split; an argument is out of range.
    """
    check_split(sequence_length, eval_fraction)
    if is_trained(tokenizer_spec):
        raise UserError(
            f"tokenizer: {tokenizer_spec!r} is trained on the whole corpus first (allowed with streaming: bytes, or "
            "a tokenizer of transformers by folder or name, such as the model/ of a run on a part of the corpus)"
        )
    text = Corpus.parse(corpus, text_field)
    tokenizer = load_tokenizer(tokenizer_spec)
    streaming = _Streaming(
        encoder=Encoder(tokenizer),
        sequence_length=sequence_length,
        eval_fraction=eval_fraction,
        eval_blocks=max(eval_blocks or _EVAL_BLOCKS, _FEWEST),
        buffer=buffer,
    )
    orders = [None if buffer == 1 else (seed, number) for number in range(len(text.parts))]
    blocks = [streaming.blocks(part.corpus, order) for part, order in zip(text.parts, orders, strict=True)]
    return mix(text.parts, blocks), tokenizer


@dataclass(frozen=True, kw_only=True)
class _Streaming:
    """The settings with which a corpus becomes a stream of blocks."""

    encoder: Encoder
    sequence_length: int
    eval_fraction: float
    eval_blocks: int
    buffer: int

    def blocks(self, corpus: SingleCorpus, seed: tuple[int, int] | None) -> Blocks:
        """The stream of a corpus' blocks, shuffled by ``seed``, and its held-out blocks."""
        encoder, length = self.encoder, self.sequence_length
        shards = corpus.shards()
        apart = hold_out(
            corpus.spec, shards, encoder, length, blocks=self.eval_blocks, eval_fraction=self.eval_fraction
        )
        held_out, known = apart.held_out.blocks(length), apart.known.blocks(length)
        stream = TokenStream(
            corpus=corpus.spec,
            shards=shards.shards,
            encoder=encoder,
            sequence_length=length,
            chars=apart.chars,
            held_out=apart.limits,
            eval_fraction=apart.fraction,
            seed=seed,
        )
        identity = f"{_FORMAT}|{shards.fingerprint}|{encoder.content_hash()}"
        identity = f"{identity}|{length}|{self.eval_fraction!r}|{self.eval_blocks}"
        stats = BlockStats(
            train_tokens=0,
            eval_tokens=held_out.size,
            train_bytes=0,
            eval_bytes=round(apart.held_out.bytes * held_out.size / apart.held_out.tokens),
            unigram_entropy=unigram_entropy(known, held_out, encoder.vocab_size),
            vocab_size=encoder.vocab_size,
            sequence_length=length,
            documents=0,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        )
        train = StreamedBlocks(stream, buffer=self.buffer, seed=seed or (0, 0), known=known)
        return Blocks(train=train, eval=ArrayBlocks(held_out), stats=stats)
