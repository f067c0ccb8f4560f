"""Packed token blocks: prepared once, kept on disk under a hash of content and settings, memory-mapped by every run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lamina.data.corpus import EMBEDDED, corpus_fingerprint, validate_corpus
from lamina.data.encoding import Encoder
from lamina.data.mix import Part, parse_mix
from lamina.data.mixed_blocks import mix
from lamina.data.packed.cache import cache_root, is_whole, publish
from lamina.data.packed.packing import Packed, pack, unigram_entropy
from lamina.data.split import count_chars, piece_chars, split_corpus
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, load_tokenizer
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# goes up whenever the same corpus and settings would give other blocks
_FORMAT = "blocks-1"
_META, _TRAIN, _EVAL = "meta.json", "train.bin", "eval.bin"


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """What a pair of splits holds. Tokens and bytes are those in whole blocks; remainders are dropped.

    ``train_bytes`` and ``eval_bytes``: UTF-8 bytes of text; end-of-text tokens count none, and the dropped remainder is
    taken to have as many bytes a token as the rest (less than a block's worth of approximation).
    ``unigram_entropy``: nats per token, cross-entropy of the eval split under the train split's add-one smoothed
    frequencies. ``documents``: in the whole corpus. ``fingerprint``: the hash of corpus, tokenizer and settings.
    """

    train_tokens: int
    eval_tokens: int
    train_bytes: int
    eval_bytes: int
    unigram_entropy: float
    vocab_size: int
    sequence_length: int
    documents: int
    fingerprint: str

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token of the eval split."""
        return self.eval_bytes / self.eval_tokens


class PackedBlocks(torch.utils.data.Dataset):
    """Token blocks in a memory-mapped file, [num_blocks, sequence_length]; pickling keeps the path, not the content.

    Item ``i`` is ``{"input_ids": LongTensor [sequence_length], "labels": the same tensor}``: models shift labels.
    """

    def __init__(self, path: Path | str, dtype: str, num_blocks: int, sequence_length: int):
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self.shape = (num_blocks, sequence_length)
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """The token ids, [num_blocks, sequence_length] of uint16 or uint32, read-only and mapped when first used."""
        if self._array is None:
            self._array = np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.shape)
        return self._array

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Many items at once, as the DataLoader asks for them: one copy out of the file."""
        rows = torch.from_numpy(self.array[np.asarray(indices, dtype=np.int64)].astype(np.int64))
        return [{"input_ids": row, "labels": row} for row in rows]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The two splits of a corpus and their numbers."""

    train: PackedBlocks
    eval: PackedBlocks
    stats: BlockStats


def prepare_blocks(
    corpus: str = EMBEDDED,
    tokenizer_spec: str = BYTES,
    sequence_length: int = 256,
    *,
    eval_fraction: float = EVAL_FRACTION,
    text_field: str = "text",
    cache_dir: Path | str | None = None,
    progress: bool = True,
) -> tuple[Blocks, PreTrainedTokenizerFast]:
    """Tokenise a corpus, hold out a part of it, and pack both parts into blocks; or find all that in the cache.

    The corpus is cut at line ends into pieces of 1 to 64 thousand characters (fewer in tiny corpora), and every so
    many-th piece is held out, so that the eval split is spread over the whole corpus and no training block holds any
    of it. In each split, an end-of-text token stands between documents and wherever a piece is missing.

    A small corpus whose share of ``eval_fraction`` would not fill one block holds out as much more as that takes.

    Args:
        corpus: see :func:`lamina.data.read_corpus`; or a mix of them, A:0.7,B:0.3 (``lamina.data.mix.parse_mix``).
        tokenizer_spec: see :func:`lamina.data.load_tokenizer`.
        sequence_length: tokens a block.
        eval_fraction: the held-out share of the text, above 0 and up to 0.5.
        text_field: the field of .jsonl rows that holds the text.
        cache_dir: default ``$LAMINA_CACHE`` or ``~/.cache/lamina``.
        progress: show a bar on a terminal when it takes more than two seconds.

    Raises:
        UserError: the corpus is missing, empty, binary or shorter than a block a split; an argument is out of range.
        OSError: the disk is full; nothing is left behind.
    """
    check_lengths(sequence_length, eval_fraction)
    root = cache_root(cache_dir)
    if parts := parse_mix(corpus):
        return _mixed(parts, corpus, tokenizer_spec, sequence_length, eval_fraction, text_field, root, progress)
    tokenizer = load_tokenizer(
        tokenizer_spec, corpus=corpus, text_field=text_field, cache_dir=root, eval_fraction=eval_fraction
    )
    return _prepared(corpus, tokenizer, sequence_length, eval_fraction, text_field, root, progress), tokenizer


def check_lengths(sequence_length: int, eval_fraction: float) -> None:
    """Raise UserError for a length or a share out of range."""
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 2:
        raise UserError(f"--sequence-length must be an integer of at least 2, not {sequence_length!r}")
    if not 0 < eval_fraction <= 0.5:
        raise UserError(f"eval_fraction must be above 0 and at most 0.5, not {eval_fraction!r}")


def _mixed(
    parts: Sequence[Part],
    corpus: str,
    tokenizer_spec: str,
    sequence_length: int,
    eval_fraction: float,
    text_field: str,
    root: Path,
    progress: bool,
) -> tuple[Blocks, PreTrainedTokenizerFast]:
    for part in parts:
        validate_corpus(part.corpus)  # all of them before the first is read
    tokenizer = load_tokenizer(
        tokenizer_spec, corpus=corpus, text_field=text_field, cache_dir=root, eval_fraction=eval_fraction
    )
    blocks = [
        _prepared(part.corpus, tokenizer, sequence_length, eval_fraction, text_field, root, progress) for part in parts
    ]
    return mix(parts, blocks), tokenizer


def _prepared(
    corpus: str,
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    eval_fraction: float,
    text_field: str,
    root: Path,
    progress: bool,
) -> Blocks:
    fingerprint = corpus_fingerprint(corpus, text_field)
    encoder = Encoder(tokenizer)
    settings = f"{_FORMAT}|{fingerprint}|{encoder.content_hash()}|{sequence_length}|{eval_fraction!r}"
    key = hashlib.sha256(settings.encode()).hexdigest()
    folder = root / "blocks" / key[:32]
    if not is_whole(folder):

        def write(draft: Path) -> None:
            packed = _pack_corpus(draft, corpus, text_field, encoder, sequence_length, eval_fraction, progress)
            _write_meta(draft, packed, encoder, sequence_length, key)

        publish(folder, write)
    return _open(folder)


def _pack_corpus(
    draft: Path,
    corpus: str,
    text_field: str,
    encoder: Encoder,
    sequence_length: int,
    eval_fraction: float,
    progress: bool,
) -> Packed:
    total = count_chars(corpus, text_field)
    chars, fraction = piece_chars(total), eval_fraction
    while True:
        segments = split_corpus(corpus, text_field, chars, fraction)
        packed = pack(
            segments, encoder, sequence_length, draft / _TRAIN, draft / _EVAL, total_chars=total, progress=progress
        )
        if packed.train_tokens and packed.eval_tokens:
            break
        if fraction >= 0.5 or packed.all_tokens < 2 * sequence_length:
            raise UserError(
                f"--corpus {corpus!r} has {packed.all_tokens} tokens, too few for --sequence-length {sequence_length}: "
                f"one block to train on and one held out need at least {2 * sequence_length}"
            )
        fraction = min(0.5, 2 * fraction)
    if fraction != eval_fraction:
        logger.warning("%s is small: %g of it is held out, not %g, to fill a block", corpus, fraction, eval_fraction)
    return packed


def _write_meta(draft: Path, packed: Packed, encoder: Encoder, sequence_length: int, key: str) -> None:
    tokens = {_TRAIN: packed.train_tokens, _EVAL: packed.eval_tokens}
    train, held_out = (
        PackedBlocks(draft / name, encoder.dtype.name, tokens[name] // sequence_length, sequence_length).array
        for name in (_TRAIN, _EVAL)
    )
    stats = BlockStats(
        train_tokens=packed.train_tokens,
        eval_tokens=packed.eval_tokens,
        train_bytes=packed.train_bytes,
        eval_bytes=packed.eval_bytes,
        unigram_entropy=unigram_entropy(train, held_out, encoder.vocab_size),
        vocab_size=encoder.vocab_size,
        sequence_length=sequence_length,
        documents=packed.documents,
        fingerprint=key,
    )
    meta = {"dtype": encoder.dtype.name, "stats": dataclasses.asdict(stats)}
    (draft / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _open(folder: Path) -> Blocks:
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    stats = BlockStats(**meta["stats"])
    train, held_out = (
        PackedBlocks(folder / name, meta["dtype"], tokens // stats.sequence_length, stats.sequence_length)
        for name, tokens in ((_TRAIN, stats.train_tokens), (_EVAL, stats.eval_tokens))
    )
    return Blocks(train=train, eval=held_out, stats=stats)


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinity where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss_per_token: float, stats: BlockStats) -> float:
    """Bits per UTF-8 byte of text: ``loss * eval_tokens / (eval_bytes * ln 2)``, comparable across tokenizers.

    Approximate in three places, each below a part in a hundred for blocks of useful length: the loss is a mean over the
    predicted tokens (all but each block's first) and stands for all of them; end-of-text tokens cost bits but have no
    bytes; the dropped remainder is taken to be like the rest.

    Args:
        loss_per_token: mean cross-entropy in nats on the eval split.
        stats: that split's numbers.
    """
    return loss_per_token * stats.eval_tokens / (stats.eval_bytes * math.log(2))
