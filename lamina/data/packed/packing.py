"""Documents to two files of token blocks, train and held out, written piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lamina.data.encoding import Encoder
from lamina.data.split import Segment

logger = logging.getLogger(__name__)

_BATCH_CHARS = 1024 * 1024


@dataclass
class Stream:
    """One split while it is written: tokens in the corpus' order, an end-of-text token wherever the text jumps."""

    path: Path
    encoder: Encoder
    tokens: int = 0
    bytes: int = 0
    last: Segment | None = None

    def __post_init__(self) -> None:
        self.file = self.path.open("wb")
        self.end = np.array([self.encoder.tokenizer.eos_token_id], dtype=self.encoder.dtype)

    def append(self, segment: Segment, ids: np.ndarray) -> None:
        """Write one segment's ids, [tokens]."""
        if self.last is not None and not segment.follows(self.last):
            self._write(self.end)
        self._write(ids)
        self.bytes += len(segment.text.encode())
        self.last = segment

    def _write(self, ids: np.ndarray) -> None:
        self.file.write(ids.tobytes())
        self.tokens += len(ids)

    def finish(self, sequence_length: int) -> None:
        """Drop what does not fill a block; ``bytes`` shrinks in the same proportion, ``tokens`` to what is left."""
        kept = self.tokens // sequence_length * sequence_length
        self.file.truncate(kept * self.encoder.dtype.itemsize)
        self.file.close()
        self.bytes = round(self.bytes * kept / max(1, self.tokens))
        self.tokens = kept


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What packing wrote: tokens and bytes in whole blocks, and how many there were before the remainders went."""

    train_tokens: int
    train_bytes: int
    eval_tokens: int
    eval_bytes: int
    all_tokens: int
    documents: int


def pack(
    segments: Iterable[Segment],
    encoder: Encoder,
    sequence_length: int,
    train_path: Path,
    eval_path: Path,
    *,
    total_chars: int,
    progress: bool,
) -> Packed:
    """Tokenise segments and write the two splits' blocks, [blocks, sequence_length] of the encoder's dtype, row by row.

    The progress bar counts characters; it appears after two seconds and on a terminal only.

    Raises:
        OSError: when the disk is full.
    """
    train, held_out = Stream(train_path, encoder), Stream(eval_path, encoder)
    documents = 0
    try:
        with tqdm(
            desc="tokenising",
            total=total_chars,
            unit="char",
            unit_scale=True,
            delay=2,
            disable=None if progress else True,
        ) as bar:
            for batch in _batches(segments):
                for segment, ids in zip(batch, encoder.encode([segment.text for segment in batch]), strict=True):
                    (held_out if segment.held_out else train).append(segment, ids)
                    documents = segment.document + 1
                bar.update(sum(len(segment.text) for segment in batch))
        all_tokens = train.tokens + held_out.tokens
        train.finish(sequence_length)
        held_out.finish(sequence_length)
    finally:
        train.file.close()
        held_out.file.close()
    return Packed(
        train_tokens=train.tokens,
        train_bytes=train.bytes,
        eval_tokens=held_out.tokens,
        eval_bytes=held_out.bytes,
        all_tokens=all_tokens,
        documents=documents,
    )


def _batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    chars = 0
    for segment in segments:
        batch.append(segment)
        chars += len(segment.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def unigram_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of the held-out tokens under the train tokens' add-one smoothed frequencies, in nats per token.

    Args:
        train: token ids, [blocks, sequence_length].
        held_out: the same of the other split.
        vocab_size: the number of ids that the smoothing counts.
    """
    train_counts, eval_counts = token_counts(train, vocab_size), token_counts(held_out, vocab_size)
    log_probability = np.log(train_counts + 1) - np.log(train_counts.sum() + vocab_size)
    return float(-(eval_counts * log_probability).sum() / eval_counts.sum())


def token_counts(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs in [blocks, sequence_length] of ids, read a few million at a time."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    rows = max(1, 2**22 // ids.shape[1])
    for start in range(0, len(ids), rows):
        counts += np.bincount(ids[start : start + rows].ravel(), minlength=vocab_size)
    return counts
