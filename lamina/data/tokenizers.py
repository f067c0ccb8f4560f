"""Tokenizers: bytes, a BPE tokenizer trained on the corpus, or any tokenizer of transformers."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.hub_access import local_when_unreachable
from lamina.core.values import nearby
from lamina.data.cache import cache_root, publish
from lamina.data.corpus import Corpus, EmbeddedCorpus
from lamina.data.split import count_chars, is_held_out, piece_chars, split_documents
from lamina.errors import UserError, nearest, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257
_MOST_BYTES = 384  # rows of the embedding of a model of bytes, with room for special tokens and padding (ByT5)
EVAL_FRACTION = 0.05
_ALLOWED = (
    f"bytes, bpe:SIZE with SIZE >= {SMALLEST_BPE}, or a transformers tokenizer (a name, a folder or a tokenizer.json)"
)
_BPE_FORMAT = "bpe-1"


def validate_spec(spec: str) -> None:
    """Check a tokenizer's name without loading anything. Raises UserError for an invalid size or a missing path."""
    if not spec.strip():
        raise UserError(f"tokenizer: the name is empty. Give {_ALLOWED}.")
    if is_trained(spec):
        _bpe_size(spec)
        return
    on_the_hub = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", spec) is not None and not spec.endswith(".json")
    if not on_the_hub and not Path(spec).expanduser().exists():
        raise UserError(f"tokenizer: {spec!r}: no such file or folder{nearby(spec)}. Give {_ALLOWED}.")


def is_trained(spec: str) -> bool:
    """Return whether a name stands for a tokenizer that Lamina trains on the corpus."""
    return spec == "bpe" or spec.startswith("bpe:")


def not_bytes(spec: str | None, rows: int | None) -> str:
    """Return a warning if ``spec`` is "bytes" and the model's embedding has too many rows for bytes, or ""."""
    if spec != BYTES or rows is None or rows <= _MOST_BYTES:
        return ""
    return (
        f"The tokenizer 'bytes' gives ids up to 256, but the model's vocabulary has {rows} tokens. If the model was "
        "not trained on bytes, the results mean nothing. Name the model's tokenizer with --tokenizer."
    )


def load_tokenizer(
    spec: str = BYTES,
    *,
    corpus: Corpus | None = None,
    cache_dir: Path | str | None = None,
    eval_fraction: float = EVAL_FRACTION,
) -> PreTrainedTokenizerFast:
    """Load or train a tokenizer that has an end-of-text token and a padding token.

    Args:
        spec: one of these names:

            - ``bytes``: the ids 0 to 255 are UTF-8 bytes, and 256 is ``<|endoftext|>``
            - ``bpe:SIZE``: a byte-level BPE tokenizer, which Lamina trains on the corpus's training split
            - a folder, a tokenizer.json, or a name on the hub
        corpus: the text to train a BPE tokenizer on (default: the built-in corpus).
        cache_dir: the folder for trained tokenizers (default: ``$LAMINA_CACHE`` or ``~/.cache/lamina``).
        eval_fraction: the fraction of the corpus to hold out when Lamina trains a BPE tokenizer. Give
            ``prepare_blocks`` the same fraction.

    Raises UserError if the name is malformed, or if Lamina can't load the tokenizer or read the corpus.
    """
    validate_spec(spec)
    if spec == BYTES:
        return _wrap(_byte_tokenizer())
    if is_trained(spec):
        return _trained_bpe(_bpe_size(spec), corpus or EmbeddedCorpus(), cache_root(cache_dir), eval_fraction)
    return _pretrained(spec)


def _bpe_size(spec: str) -> int:
    size = spec.partition(":")[2]
    if not re.fullmatch(r"[0-9]{1,9}", size) or int(size) < SMALLEST_BPE:
        raise UserError(
            f"tokenizer: {spec!r}. Write bpe:SIZE with a whole number of at least {SMALLEST_BPE} (256 bytes and "
            f"{END_OF_TEXT}), as in bpe:4096."
        )
    return int(size)


def _byte_tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in sorted(bytes_to_unicode().items())}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, END_OF_TEXT: 256}, merges=[]))
    _work_on_bytes(tokenizer, split_words=False)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def _work_on_bytes(tokenizer: Tokenizer, *, split_words: bool) -> None:
    from tokenizers import decoders, pre_tokenizers

    # the Rust class has these properties, but the stubs declare the properties read-only
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _trained_bpe(size: int, corpus: Corpus, cache: Path, eval_fraction: float) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    settings = f"{_BPE_FORMAT}|{corpus.fingerprint()}|{size}|{eval_fraction!r}"
    folder = cache / "tokenizers" / hashlib.sha256(settings.encode()).hexdigest()[:32]
    file = folder / "tokenizer.json"

    def write(draft: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        _work_on_bytes(tokenizer, split_words=True)
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_train_texts(corpus, eval_fraction), trainer=trainer)
        if tokenizer.get_vocab_size() < size:
            logger.warning(
                "the corpus is too small: its BPE tokenizer has %d tokens instead of %d",
                tokenizer.get_vocab_size(),
                size,
            )
        tokenizer.save(str(draft / file.name))

    publish(folder, write)
    return _wrap(Tokenizer.from_file(str(file)))


def _train_texts(corpus: Corpus, eval_fraction: float) -> Iterator[str]:
    for part in corpus.parts:  # each corpus as a whole, regardless of the shares
        for segment in split_documents(part.corpus.documents(), piece_chars(count_chars(part.corpus))):
            if not is_held_out(segment.piece, eval_fraction):
                yield segment.text


def _pretrained(spec: str) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(spec).expanduser()
    reachable = True
    try:
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        elif path.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        else:
            with local_when_unreachable() as reachable:
                tokenizer = AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
    # malformed files, missing files and an unreachable hub raise a dozen unrelated exception types
    except Exception as error:
        if path.is_dir():
            reason = f"the folder holds no tokenizer that transformers can load; {one_line(error)}"
        else:
            reason = one_line(error) if reachable else "the hub cannot be reached, and this machine has no copy"
        raise UserError(
            f"tokenizer: {spec!r} could not be loaded ({reason}){nearest(spec, [BYTES]) or '.'} Give {_ALLOWED}."
        ) from error
    if tokenizer.eos_token is None and tokenizer.sep_token is not None:
        tokenizer.eos_token = tokenizer.sep_token  # as in BERT
    elif tokenizer.eos_token is None:
        tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
