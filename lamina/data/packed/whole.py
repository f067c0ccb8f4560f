"""A whole corpus as token blocks, with a tokenizer that is given: text to evaluate on, none of it trained on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.data.blocks import ArrayBlocks
from lamina.data.cache import cache_root, is_whole, publish
from lamina.data.corpus import Corpus, SingleCorpus
from lamina.data.encoding import Encoder
from lamina.data.packed.packed_blocks import PackedBlocks
from lamina.data.packed.split_files import pack
from lamina.data.split import count_chars, piece_chars, split_corpus
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# increases whenever the same corpus and tokenizer would give other blocks
_FORMAT = "whole-1"
_META, _NONE, _ALL = "meta.json", "train.bin", "eval.bin"


def single_corpus_of(spec: str, text_field: str = "text") -> SingleCorpus:
    """The corpus with this name, which is not a mix. Raises UserError; nothing is read yet."""
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
    cache_dir: Path | str | None = None,
    progress: bool = True,
) -> ArrayBlocks:
    """All text of a corpus, tokenized and packed into blocks in its order, or read from the cache.

    An end-of-text token stands between documents; what does not fill a last block is dropped.

    Args:
        spec: see :meth:`lamina.data.Corpus.parse`; not a mix.
        tokenizer: any tokenizer of transformers.
        sequence_length: tokens per block.
        text_field: the field of rows that holds the text.
        cache_dir: default ``$LAMINA_CACHE`` or ``~/.cache/lamina``.
        progress: show a progress bar on a terminal after two seconds.

    Raises:
        UserError: the corpus is missing, empty, binary, a mix, or too short for a block.
        OSError: the disk is full. Nothing is left in the cache.
    """
    corpus, encoder = single_corpus_of(spec, text_field), Encoder(tokenizer)
    identity = f"{_FORMAT}|{corpus.fingerprint()}|{encoder.content_hash()}|{sequence_length}"
    folder = cache_root(cache_dir) / "blocks" / hashlib.sha256(identity.encode()).hexdigest()[:32]

    def write(draft: Path) -> None:
        total = count_chars(corpus)
        segments = split_corpus(corpus, piece_chars(total), 1.0)  # every piece is "held out"
        files = {"train_path": draft / _NONE, "eval_path": draft / _ALL}
        packed = pack(segments, encoder, sequence_length, **files, total_chars=total, progress=progress)
        if not packed.eval_tokens:
            raise UserError(
                f"corpus: {spec!r} has {packed.all_tokens} tokens, too few for a block of sequence_length = "
                f"{sequence_length}"
            )
        meta = {"dtype": encoder.dtype.name, "blocks": packed.eval_tokens // sequence_length}
        (draft / _META).write_text(json.dumps(meta), encoding="utf-8")

    if not is_whole(folder):
        publish(folder, write)
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    return PackedBlocks(folder / _ALL, meta["dtype"], meta["blocks"], sequence_length)
