"""Packed token blocks: prepared once, cached on disk under a hash of content and settings, memory-mapped by runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from lamina.core.progress import has_bars
from lamina.data.blocks import ArrayBlocks, Blocks, BlockStats, mix, unigram_entropy
from lamina.data.cache import cache_root, is_whole, publish
from lamina.data.corpus import EMBEDDED, Corpus, SingleCorpus
from lamina.data.encoding import TextEncoder, TokenJoiner
from lamina.data.split import Segment, check_split, count_chars, piece_chars, split_corpus
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, is_trained, load_tokenizer
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_BATCH_CHARS = 1024 * 1024
logger = logging.getLogger(__name__)

# They increase whenever the same corpus and settings would give other blocks.
_FORMAT, _WHOLE_FORMAT = "blocks-1", "whole-1"
_META, _TRAIN, _EVAL = "meta.json", "train.bin", "eval.bin"


class PackedBlocks(ArrayBlocks):
    """Token blocks in a memory-mapped file, [num_blocks, sequence_length]; pickling keeps the path, not the content."""

    def __init__(self, path: Path | str, dtype: str, num_blocks: int, sequence_length: int):
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self.shape = (num_blocks, sequence_length)
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """The token ids, [num_blocks, sequence_length] of uint16 or uint32, read-only, mapped at first use."""
        if self._array is None:
            self._array = np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.shape)
        return self._array

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_array": None}


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
        encoder=TextEncoder(tokenizer),
        sequence_length=sequence_length,
        eval_fraction=eval_fraction,
        progress=progress,
        trains_tokenizer=is_trained(tokenizer_spec),
    )
    return mix(text.parts, [packing.blocks(part.corpus, root) for part in text.parts]), tokenizer


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """The settings with which a corpus becomes packed blocks."""

    encoder: TextEncoder
    sequence_length: int
    eval_fraction: float
    progress: bool
    trains_tokenizer: bool

    def blocks(self, corpus: SingleCorpus, root: Path) -> Blocks:
        """Return the blocks of a corpus from the cache in ``root``, packed first where the cache does not have them."""
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
            segments = split_corpus(corpus, chars, fraction)
            packed = pack(segments, self.encoder, length, draft, total_chars=total, progress=self.progress)
            if packed.train.tokens and packed.held_out.tokens:
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
        train, held_out = (
            PackedBlocks(file.path, dtype, file.tokens // length, length) for file in (packed.train, packed.held_out)
        )
        stats = BlockStats(
            train_tokens=packed.train.tokens,
            eval_tokens=packed.held_out.tokens,
            train_bytes=packed.train.bytes,
            eval_bytes=packed.held_out.bytes,
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


@dataclass
class SplitFile:
    """The file of one split while it is written: its tokens in the order of the corpus, joined by a TokenJoiner.

    ``tokens`` counts the tokens written, ``bytes`` the UTF-8 bytes of the text added.
    """

    path: Path
    encoder: TextEncoder
    tokens: int = 0
    bytes: int = 0
    joiner: TokenJoiner = field(init=False)

    def __post_init__(self) -> None:
        self.file = self.path.open("wb")
        self.joiner = TokenJoiner(self.encoder)

    def add(self, segment: Segment) -> None:
        """Add a segment, which ``flush`` writes."""
        self.joiner.add(segment)
        self.bytes += len(segment.text.encode())

    def flush(self) -> None:
        """Write the tokens of the added segments."""
        ids = self.joiner.encode()
        self.file.write(ids.tobytes())
        self.tokens += len(ids)

    def finish(self, sequence_length: int) -> None:
        """Cut the file to whole blocks and close it; ``tokens`` and, in proportion, ``bytes`` shrink with it."""
        whole = self.tokens // sequence_length * sequence_length
        self.file.truncate(whole * self.encoder.dtype.itemsize)
        self.file.close()
        self.bytes = round(self.bytes * whole / max(1, self.tokens))
        self.tokens = whole


class Packed(NamedTuple):
    """The files of both splits in whole blocks. ``all_tokens`` counts the dropped remainders, too."""

    train: SplitFile
    held_out: SplitFile
    all_tokens: int
    documents: int


def pack(
    segments: Iterable[Segment],
    encoder: TextEncoder,
    sequence_length: int,
    folder: Path,
    *,
    total_chars: int,
    progress: bool,
) -> Packed:
    """Tokenize segments and write the blocks of both splits, [blocks, sequence_length] of the encoder's dtype.

    The progress bar counts characters. It appears after two seconds, and only on a terminal.

    Raises:
        OSError: the disk is full.
    """
    train, held_out = SplitFile(folder / _TRAIN, encoder), SplitFile(folder / _EVAL, encoder)
    documents = 0
    quiet = not (progress and has_bars())
    try:
        with tqdm(desc="tokenizing", total=total_chars, unit="char", unit_scale=True, delay=2, disable=quiet) as bar:
            for segment in segments:
                (held_out if segment.held_out else train).add(segment)
                documents = segment.document + 1
                if (chars := train.joiner.chars + held_out.joiner.chars) >= _BATCH_CHARS:
                    train.flush()
                    held_out.flush()
                    bar.update(chars)
            bar.update(train.joiner.chars + held_out.joiner.chars)
            train.flush()
            held_out.flush()
        all_tokens = train.tokens + held_out.tokens
        train.finish(sequence_length)
        held_out.finish(sequence_length)
    finally:
        train.file.close()
        held_out.file.close()
    return Packed(train, held_out, all_tokens, documents)


def single_corpus_of(spec: str, text_field: str = "text") -> SingleCorpus:
    """Return the corpus with this name, which is not a mix. Raises UserError; nothing is read yet."""
    corpus = Corpus.parse(spec, text_field)
    if not isinstance(corpus, SingleCorpus):
        raise UserError(f"corpus: {spec!r} is a mix (allowed here: one corpus)")
    return corpus


def whole_blocks(
    spec: str,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    text_field: str = "text",
    progress: bool = True,
) -> ArrayBlocks:
    """Return all text of a corpus, tokenized and packed into blocks in its order, or read from the cache.

    An end-of-text token stands between documents; what does not fill a last block is dropped.

    Args:
        spec: see :meth:`lamina.data.Corpus.parse`; not a mix.
        tokenizer: any tokenizer of transformers.
        sequence_length: tokens per block.
        text_field: the field of rows that holds the text.
        progress: show a progress bar on a terminal after two seconds.

    Raises:
        UserError: the corpus is missing, empty, binary, a mix, or too short for a block.
        OSError: the disk is full. Nothing is left in the cache.
    """
    corpus, encoder = single_corpus_of(spec, text_field), TextEncoder(tokenizer)
    identity = f"{_WHOLE_FORMAT}|{corpus.fingerprint()}|{encoder.content_hash()}|{sequence_length}"
    folder = cache_root() / "blocks" / hashlib.sha256(identity.encode()).hexdigest()[:32]

    def write(draft: Path) -> None:
        total = count_chars(corpus)
        segments = split_corpus(corpus, piece_chars(total), 1.0)  # every piece is "held out"
        packed = pack(segments, encoder, sequence_length, draft, total_chars=total, progress=progress)
        if not packed.held_out.tokens:
            raise UserError(
                f"corpus: {spec!r} has {packed.all_tokens} tokens, too few for a block of sequence_length = "
                f"{sequence_length}"
            )
        meta = {"dtype": encoder.dtype.name, "blocks": packed.held_out.tokens // sequence_length}
        (draft / _META).write_text(json.dumps(meta), encoding="utf-8")

    if not is_whole(folder):
        publish(folder, write)
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    return PackedBlocks(folder / _EVAL, meta["dtype"], meta["blocks"], sequence_length)
