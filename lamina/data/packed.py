"""Blocks of tokens that Lamina prepares once and keeps in the cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from tqdm import tqdm

from lamina.core.json_types import Json
from lamina.core.progress import has_bars
from lamina.data.blocks import ArrayBlocks, Blocks, BlockStats, TokenBlock, mix, spread, unigram_entropy
from lamina.data.cache import cache_root, publish
from lamina.data.corpus import EMBEDDED, Corpus, SingleCorpus
from lamina.data.encoding import RowJoiner, TextEncoder, TokenJoiner
from lamina.data.split import (
    Segment,
    check_split,
    count_chars,
    is_held_out,
    piece_chars,
    split_documents,
    whole_documents,
)
from lamina.data.tokenizers import BYTES, EVAL_FRACTION, is_trained, load_tokenizer
from lamina.errors import UserError
from lamina.jobs.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_BATCH_CHARS = 1024 * 1024
logger = logging.getLogger(__name__)

# Increase these versions whenever the same corpus and settings would give other blocks.
_FORMAT, _WHOLE_FORMAT = "blocks-1", "whole-1"
_META, _TRAIN, _EVAL = "meta.json", "train.bin", "eval.bin"


class PackedBlocks(ArrayBlocks):
    """Token blocks in a memory-mapped file, [num_blocks, sequence_length]. Pickling stores only the file's path."""

    def __init__(self, path: Path | str, dtype: str, num_blocks: int, sequence_length: int):
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self.shape = (num_blocks, sequence_length)
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.shape)
        return self._array

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_array": None}


class PaddedBlocks(PackedBlocks):
    """Token blocks with one document each, padded to the same length.

    The file marks padding with the id ``padding``. The model reads padding as the token ``filler`` with the label -100.
    """

    padding: int
    filler: int
    _lengths: np.ndarray | None = None

    def __getitems__(self, indices: Sequence[int]) -> list[TokenBlock]:
        rows = torch.from_numpy(self.array[np.asarray(indices, dtype=np.int64)].astype(np.int64))
        real = rows != self.padding
        ids, mask, labels = rows.where(real, self.filler), real.long(), rows.where(real, -100)
        # no prediction for the first token, so the number of labels equals the number of predictions
        labels[:, 0] = -100
        batch = zip(ids, mask, labels, strict=True)
        return [{"input_ids": row, "attention_mask": shown, "labels": wanted} for row, shown, wanted in batch]

    @property
    def _lengths_file(self) -> Path:
        return self.path.with_suffix(".lengths.npy")

    def write_lengths(self) -> None:
        """Save the number of tokens in each row beside the file, so that a run need not count the tokens again."""
        np.save(self._lengths_file, self.lengths)

    @property
    def lengths(self) -> np.ndarray:
        if self._lengths is None and self._lengths_file.is_file():
            self._lengths = np.load(self._lengths_file, mmap_mode="r")
        if self._lengths is None:  # an older version of Lamina packed the rows
            step = max(1, 2**22 // self.shape[1])
            parts = [self.array[start : start + step] != self.padding for start in range(0, len(self), step)]
            self._lengths = np.concatenate([part.sum(1) for part in parts])
        return self._lengths

    def sample(self, count: int) -> torch.Tensor:
        """Return up to ``count`` full blocks, which Lamina cuts from the joined texts of evenly spaced rows."""
        length = self.shape[1]
        rows = self.array[spread(len(self), math.ceil(2 * count * length / self.lengths.mean()))]
        text = rows[rows != self.padding].astype(np.int64)
        blocks = text[: len(text) // length * length].reshape(-1, length) if len(text) > length else text[None]
        return torch.from_numpy(blocks[spread(len(blocks), count)])


def _opened(path: Path, encoder: TextEncoder, sequence_length: int, *, padded: bool) -> PackedBlocks:
    kind, dtype = (PaddedBlocks, encoder.padded_dtype) if padded else (PackedBlocks, encoder.dtype)
    blocks = kind(path, dtype.name, path.stat().st_size // (dtype.itemsize * sequence_length), sequence_length)
    if isinstance(blocks, PaddedBlocks):
        padding, end = encoder.tokenizer.pad_token_id, encoder.tokenizer.eos_token_id
        blocks.padding, blocks.filler = encoder.vocab_size, cast("int", end if padding is None else padding)
    return blocks


def prepare_blocks(
    corpus: str = EMBEDDED,
    tokenizer_spec: str = BYTES,
    sequence_length: int = 256,
    *,
    eval_fraction: float = EVAL_FRACTION,
    text_field: str = "text",
    cache_dir: Path | str | None = None,
    padded: bool = False,
    progress: bool = True,
) -> tuple[Blocks, PreTrainedTokenizerFast]:
    """Tokenize a corpus, hold out a part of the text, and cut the text into blocks. Later calls use the cache.

    Lamina cuts the corpus at line ends into pieces of 1,024 to 65,536 characters. A tiny corpus has shorter pieces.
    Lamina holds out every n-th piece, so the eval split is spread over the whole corpus, and no training block contains
    eval text. An end-of-text token separates texts that are not adjacent in the corpus. If the corpus is small, Lamina
    holds out more than ``eval_fraction`` to fill at least one block.

    Args:
        corpus: see :meth:`lamina.data.corpus.Corpus.parse`.
        tokenizer_spec: see :func:`lamina.data.tokenizers.load_tokenizer`.
        sequence_length: tokens per block.
        eval_fraction: the held-out fraction of the text, above 0 and up to 0.5.
        text_field: the field of .jsonl rows that holds the text.
        cache_dir: the cache's folder (default: ``$LAMINA_CACHE`` or ``~/.cache/lamina``).
        padded: whether each document fills one block, cut or padded to ``sequence_length``. Lamina then holds out a
            whole document if the document begins in a held-out piece.
        progress: whether to show a progress bar on a terminal after two seconds.

    Raises:
        UserError: the corpus is missing, empty, binary or too short for two blocks, or an argument is out of range.
        OSError: the disk is full. Lamina leaves nothing in the cache.
    """
    check_split(sequence_length, eval_fraction)
    root = cache_root(cache_dir)
    text = Corpus.parse(corpus, text_field)
    if padded and len(text.parts) > 1:
        raise UserError(f"corpus: {corpus!r} is a mix. Give one corpus, or remove --packing off.")
    tokenizer = load_tokenizer(tokenizer_spec, corpus=text, cache_dir=root, eval_fraction=eval_fraction)
    encoder = TextEncoder(tokenizer)
    packing = _Packing(encoder=encoder, sequence_length=sequence_length, padded=padded, progress=progress)
    trained = is_trained(tokenizer_spec)
    return mix(
        text.parts, [packing.blocks(part.corpus, root, eval_fraction, trained) for part in text.parts]
    ), tokenizer


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """The settings for converting a corpus to blocks."""

    encoder: TextEncoder
    sequence_length: int
    padded: bool
    progress: bool

    def blocks(self, corpus: SingleCorpus, root: Path, eval_fraction: float, trained: bool) -> Blocks:
        identity = f"{_FORMAT}{'-padded' * self.padded}|{corpus.fingerprint()}|{self.encoder.content_hash()}"
        key = hashlib.sha256(f"{identity}|{self.sequence_length}|{eval_fraction!r}".encode()).hexdigest()

        def write(draft: Path) -> Json:
            packed, fraction = self._pack(draft, corpus, eval_fraction)
            if fraction != eval_fraction:
                small = "corpus %s is small. To fill an eval block, Lamina holds out the fraction %g instead of %g%s"
                seen = "; Lamina trained the BPE tokenizer partly on held-out text" if trained else ""
                logger.warning(small, corpus.spec, fraction, eval_fraction, seen)
            train, held_out = self._open(draft)
            if isinstance(train, PaddedBlocks):
                train.write_lengths()
            stats = BlockStats(
                train_tokens=packed.train.tokens,
                eval_tokens=packed.held_out.tokens,
                train_bytes=packed.train.bytes,
                eval_bytes=packed.held_out.bytes,
                unigram_entropy=unigram_entropy(train.array, held_out.array, self.encoder.vocab_size),
                vocab_size=self.encoder.vocab_size,
                sequence_length=self.sequence_length,
                documents=packed.documents,
                fingerprint=key,
            )
            return {"dtype": self.encoder.dtype.name, "stats": dataclasses.asdict(stats)}

        folder, meta = _cached(root, key, write)
        stats = BlockStats(**meta["stats"])
        train, held_out = self._open(folder)
        return Blocks(train=train, eval=held_out, stats=stats)

    def _open(self, folder: Path) -> list[PackedBlocks]:
        paths = folder / _TRAIN, folder / _EVAL
        return [_opened(path, self.encoder, self.sequence_length, padded=self.padded) for path in paths]

    def _pack(self, draft: Path, corpus: SingleCorpus, fraction: float) -> tuple[Packed, float]:
        """Write a corpus's blocks. Return the files and the held-out fraction, which is higher for a small corpus."""
        total, length = count_chars(corpus), self.sequence_length
        options = {"total_chars": total, "padded": self.padded, "progress": self.progress}
        while True:
            packed = pack(corpus, fraction, self.encoder, length, draft, **options)
            if packed.train.tokens and packed.held_out.tokens:
                return packed, fraction
            if self.padded and (fraction >= 0.5 or packed.documents < 2):
                raise UserError(
                    f"corpus: {corpus.spec!r} has too few documents for training and evaluation: {packed.documents}. "
                    "Give a .jsonl file with a document per row, or remove --packing off."
                )
            if not self.padded and (fraction >= 0.5 or packed.all_tokens < 2 * length):
                raise UserError(
                    f"corpus: {corpus.spec!r} has {packed.all_tokens} tokens, too few for a sequence_length of "
                    f"{length}. Give at least {2 * length} tokens, or lower sequence_length."
                )
            fraction = min(0.5, 2 * fraction)


def _cached(root: Path, key: str, write: Callable[[Path], Json]) -> tuple[Path, Json]:
    folder = root / "blocks" / key[:32]
    publish(folder, lambda draft: (draft / _META).write_text(json.dumps(write(draft), indent=1), encoding="utf-8"))
    return folder, read_json(folder / _META)


@dataclass
class SplitFile:
    """An open file for the tokens of one split. The attributes count the tokens and the text's UTF-8 bytes."""

    file: BinaryIO
    joiner: TokenJoiner
    tokens: int = 0
    bytes: int = 0

    def add(self, segment: Segment) -> None:
        self.joiner.add(segment)
        self.bytes += len(segment.text.encode())

    def flush(self) -> None:
        ids = self.joiner.encode()
        self.file.write(ids.tobytes())
        self.tokens += int(np.count_nonzero(ids < self.joiner.encoder.vocab_size))

    def finish(self, sequence_length: int) -> int:
        """Drop the tokens after the last full block, reduce ``bytes`` in proportion, and return the old token count."""
        self.flush()
        every = self.tokens
        if isinstance(self.joiner, RowJoiner):
            every += self.joiner.cut
        else:
            self.tokens = self.tokens // sequence_length * sequence_length
            self.file.truncate(self.tokens * self.joiner.encoder.dtype.itemsize)
        self.bytes = round(self.bytes * self.tokens / max(1, every))
        return every


class Packed(NamedTuple):
    """The files of the training split and the eval split. ``all_tokens`` includes the tokens that no block contains."""

    train: SplitFile
    held_out: SplitFile
    all_tokens: int
    documents: int


def pack(
    corpus: SingleCorpus,
    fraction: float,
    encoder: TextEncoder,
    sequence_length: int,
    folder: Path,
    *,
    total_chars: int,
    padded: bool = False,
    progress: bool,
) -> Packed:
    """Tokenize a corpus, hold out a fraction of the text, and write the blocks of both splits into ``folder``.

    The files hold [blocks, sequence_length] of the encoder's dtype. With ``padded``, each block holds one document, and
    the dtype is the encoder's ``padded_dtype``. Raises OSError if the disk is full.
    """
    documents = 0
    quiet = not (progress and has_bars())
    with (
        (folder / _TRAIN).open("wb") as train_file,
        (folder / _EVAL).open("wb") as eval_file,
        tqdm(desc="tokenizing", total=total_chars, unit="char", unit_scale=True, delay=2, disable=quiet) as bar,
    ):
        train, held_out = (
            SplitFile(file, RowJoiner(encoder, sequence_length) if padded else TokenJoiner(encoder))
            for file in (train_file, eval_file)
        )
        cut = whole_documents if padded else split_documents
        for segment in cut(corpus.documents(), piece_chars(total_chars)):
            (held_out if is_held_out(segment.piece, fraction) else train).add(segment)
            documents = segment.document + 1
            if (chars := train.joiner.chars + held_out.joiner.chars) >= _BATCH_CHARS:
                train.flush()
                held_out.flush()
                bar.update(chars)
        bar.update(train.joiner.chars + held_out.joiner.chars)
        all_tokens = train.finish(sequence_length) + held_out.finish(sequence_length)
    return Packed(train, held_out, all_tokens, documents)


def single_corpus_of(spec: str, text_field: str = "text") -> SingleCorpus:
    """Return the corpus with this name, without reading it. Raises UserError for a mix."""
    corpus = Corpus.parse(spec, text_field)
    if not isinstance(corpus, SingleCorpus):
        raise UserError(f"corpus: {spec!r} is a mix. Give one corpus.")
    return corpus


def whole_blocks(
    spec: str,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    text_field: str = "text",
    padded: bool = False,
    progress: bool = True,
) -> ArrayBlocks:
    """Return the whole text of a corpus in blocks, in the corpus's order. Later calls read the blocks from the cache.

    An end-of-text token stands between documents. Lamina drops the tokens after the last full block. ``spec`` must not
    be a mix. For the other arguments, see :func:`prepare_blocks`.
    """
    corpus, encoder = single_corpus_of(spec, text_field), TextEncoder(tokenizer)
    identity = f"{_WHOLE_FORMAT}{'-padded' * padded}|{corpus.fingerprint()}|{encoder.content_hash()}|{sequence_length}"

    def write(draft: Path) -> Json:
        total = count_chars(corpus)
        options = {"total_chars": total, "padded": padded, "progress": progress}
        packed = pack(corpus, 1.0, encoder, sequence_length, draft, **options)
        if not packed.held_out.tokens:
            raise UserError(
                f"corpus: {spec!r} has {packed.all_tokens} tokens, too few for a block of sequence_length = "
                f"{sequence_length}. Give a longer text."
            )
        return {}

    folder, _ = _cached(cache_root(), hashlib.sha256(identity.encode()).hexdigest(), write)
    return _opened(folder / _EVAL, encoder, sequence_length, padded=padded)
