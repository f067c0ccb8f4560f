"""Packed token blocks: prepared once, cached on disk under a hash of content and settings, memory-mapped by runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.data.blocks import Blocks, BlockStats
from lamina.data.cache import cache_root, is_whole, publish
from lamina.data.corpus import EMBEDDED, Corpus, SingleCorpus
from lamina.data.encoding import Encoder
from lamina.data.mixed_blocks import mix
from lamina.data.packed.packed_blocks import PackedBlocks
from lamina.data.packed.split_files import Packed, pack
from lamina.data.split import check_split, count_chars, piece_chars, split_corpus
from lamina.data.token_counts import unigram_entropy
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, is_trained, load_tokenizer
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# increases whenever the same corpus and settings would give other blocks
_FORMAT = "blocks-1"
_META, _TRAIN, _EVAL = "meta.json", "train.bin", "eval.bin"


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
    """Tokenize a corpus, hold out a part of it, and pack both parts into blocks, or read the blocks from the cache.

    The corpus is cut at line ends into pieces of 1 to 64 thousand characters (fewer in tiny corpora). Every n-th piece
    is held out, so the eval split is spread over the whole corpus and no training block contains any of it. In each
    split, an end-of-text token stands between documents and wherever a piece is missing.

    A small corpus, of which ``eval_fraction`` would not fill one block, holds out more.

    Args:
        corpus: see :meth:`lamina.data.Corpus.parse`.
        tokenizer_spec: see :func:`lamina.data.load_tokenizer`.
        sequence_length: tokens per block.
        eval_fraction: the held-out share of the text, above 0 and up to 0.5.
        text_field: the field of .jsonl rows that holds the text.
        cache_dir: default ``$LAMINA_CACHE`` or ``~/.cache/lamina``.
        progress: show a progress bar on a terminal after two seconds.

    Raises:
        UserError: the corpus is missing, empty, binary or too short for a block per split; an argument is out of range.
        OSError: the disk is full. Nothing is left in the cache.
    """
    check_split(sequence_length, eval_fraction)
    root = cache_root(cache_dir)
    text = Corpus.parse(corpus, text_field)
    tokenizer = load_tokenizer(tokenizer_spec, corpus=text, cache_dir=root, eval_fraction=eval_fraction)
    packing = _Packing(
        encoder=Encoder(tokenizer),
        sequence_length=sequence_length,
        eval_fraction=eval_fraction,
        progress=progress,
        trains_tokenizer=is_trained(tokenizer_spec),
    )
    return mix(text.parts, [packing.blocks(part.corpus, root) for part in text.parts]), tokenizer


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """The settings with which a corpus becomes packed blocks."""

    encoder: Encoder
    sequence_length: int
    eval_fraction: float
    progress: bool
    trains_tokenizer: bool

    def blocks(self, corpus: SingleCorpus, root: Path) -> Blocks:
        """The blocks of a corpus from the cache in ``root``, packed first where the cache does not have them."""
        identity = f"{_FORMAT}|{corpus.fingerprint()}|{self.encoder.content_hash()}"
        key = hashlib.sha256(f"{identity}|{self.sequence_length}|{self.eval_fraction!r}".encode()).hexdigest()
        folder = root / "blocks" / key[:32]
        if not is_whole(folder):
            publish(folder, lambda draft: self._write_meta(draft, self._pack(draft, corpus), key))
        return _open(folder)

    def _pack(self, draft: Path, corpus: SingleCorpus) -> Packed:
        total, length = count_chars(corpus), self.sequence_length
        chars, fraction = piece_chars(total), self.eval_fraction
        while True:
            packed = pack(
                split_corpus(corpus, chars, fraction),
                self.encoder,
                length,
                draft / _TRAIN,
                draft / _EVAL,
                total_chars=total,
                progress=self.progress,
            )
            if packed.train_tokens and packed.eval_tokens:
                break
            if fraction >= 0.5 or packed.all_tokens < 2 * length:
                raise UserError(
                    f"corpus: {corpus.spec!r} has {packed.all_tokens} tokens, too few for a sequence_length of "
                    f"{length}: one block to train on and one held out need at least {2 * length}"
                )
            fraction = min(0.5, 2 * fraction)
        if fraction != self.eval_fraction:
            small = "%s is small: %g of it is held out, not %g, to fill a block%s"
            seen = "; its bpe tokenizer was trained on a part of that" if self.trains_tokenizer else ""
            logger.warning(small, corpus.spec, fraction, self.eval_fraction, seen)
        return packed

    def _write_meta(self, draft: Path, packed: Packed, key: str) -> None:
        dtype, length = self.encoder.dtype.name, self.sequence_length
        train = PackedBlocks(draft / _TRAIN, dtype, packed.train_tokens // length, length)
        held_out = PackedBlocks(draft / _EVAL, dtype, packed.eval_tokens // length, length)
        stats = BlockStats(
            train_tokens=packed.train_tokens,
            eval_tokens=packed.eval_tokens,
            train_bytes=packed.train_bytes,
            eval_bytes=packed.eval_bytes,
            unigram_entropy=unigram_entropy(train.array, held_out.array, self.encoder.vocab_size),
            vocab_size=self.encoder.vocab_size,
            sequence_length=length,
            documents=packed.documents,
            fingerprint=key,
        )
        meta = {"dtype": dtype, "stats": dataclasses.asdict(stats)}
        (draft / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _open(folder: Path) -> Blocks:
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    stats = BlockStats(**meta["stats"])
    train, held_out = (
        PackedBlocks(folder / name, meta["dtype"], tokens // stats.sequence_length, stats.sequence_length)
        for name, tokens in ((_TRAIN, stats.train_tokens), (_EVAL, stats.eval_tokens))
    )
    return Blocks(train=train, eval=held_out, stats=stats)
