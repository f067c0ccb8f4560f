"""Fast conversion of text to token ids, without special tokens."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lamina.core.json_types import Json
from lamina.data.split import Segment


def ids_are_bytes(tokenizer: Json) -> bool:
    """Return whether a tokenizer.json maps every text to its UTF-8 bytes, with the byte's value as the token id."""
    model, pre_tokenizer = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
    vocabulary = model.get("vocab") or {}
    plain_bpe = (
        model.get("type") == "BPE"
        and not model.get("merges")
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and (not model.get("ignore_merges") or len(vocabulary) == 256)
    )
    return (
        plain_bpe
        and tokenizer["normalizer"] is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space")
        and all(vocabulary.get(character) == byte for byte, character in bytes_to_unicode().items())
        and all(token["special"] for token in tokenizer["added_tokens"])
    )


def vocab_size_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of embeddings that a tokenizer needs. Unused token ids need embeddings, too."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)


def known(token: int, size: int | None, source: str, notes: list[str] | None) -> int | None:
    """Return the end-of-text token's id, or add a line to ``notes`` and return None if the vocabulary lacks the id."""
    if size is None or token < size:
        return token
    if notes is not None:
        notes.append(
            f"{source}: the model's vocabulary of {size} lacks the end-of-text token {token}, so Lamina adds no such "
            "token to the text"
        )
    return None


class TextEncoder:
    """Encode texts without special tokens, truncation or padding. The tokenizer itself stays unchanged.

    The encoder reads ``<|endoftext|>`` in a text as plain characters, so a text cannot fake the end of a document.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.backend: Tokenizer | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            self.backend = Tokenizer.from_str(backend.to_str())
            self.backend.no_truncation()
            self.backend.no_padding()
            self.backend.encode_special_tokens = True
        self.is_bytes = self.backend is not None and ids_are_bytes(json.loads(self.backend.to_str()))
        self.vocab_size = vocab_size_of(tokenizer)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.padded_dtype = np.min_scalar_type(self.vocab_size)  # the id ``vocab_size`` marks padding

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, [tokens] of ``dtype``."""
        if self.is_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]
        if self.backend is not None:
            batch = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=self.dtype) for encoding in batch]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        return [np.array(ids, dtype=self.dtype) for ids in cast("list[list[int]]", encoded["input_ids"])]

    def content_hash(self) -> str:
        """Return a hash of the tokenizer and its end-of-text id. Equal hashes mean equal token ids for every text."""
        digest = hashlib.sha256(f"{self.tokenizer.eos_token_id}\0{self.vocab_size}\0".encode())
        if self.backend is not None:
            digest.update(self.backend.to_str().encode())
            return digest.hexdigest()
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


class TokenJoiner:
    """Join segments of text into one sequence of tokens, with an end-of-text token in each gap between segments.

    A gap means that two segments do not follow each other in the same document, or that :meth:`jump` was called.

    Attributes:
        last: the document and the character at which the last segment ended, or None before the first segment.
        chars: the number of characters added since the last :meth:`encode`.
    """

    ELSEWHERE = (-1, -1)

    def __init__(self, encoder: TextEncoder, last: tuple[int, int] | None = None):
        self.encoder, self.last, self.chars = encoder, last, 0
        self._end = np.array([encoder.tokenizer.eos_token_id], dtype=encoder.dtype)
        self._texts: list[str] = []
        self._breaks: list[bool] = []

    def add(self, segment: Segment) -> None:
        self._texts.append(segment.text)
        self._breaks.append(self.last not in (None, segment.begin))
        self.last = segment.end
        self.chars += len(segment.text)

    def jump(self) -> None:
        """Put an end-of-text token before the next segment, for the beginning of a new file."""
        self.last = None if self.last is None else self.ELSEWHERE

    def encode(self) -> np.ndarray:
        """Return the tokens, [tokens], of the segments that were added since the last call."""
        if not self._texts:
            return self._end[:0]
        rows: list[np.ndarray] = []
        for jump, ids in zip(self._breaks, self.encoder.encode(self._texts), strict=True):
            rows += [self._end, ids] if jump else [ids]
        self._texts, self._breaks, self.chars = [], [], 0
        return np.concatenate(rows)


class RowJoiner(TokenJoiner):
    """Convert each segment to a row of ``sequence_length`` token ids, which ends with an end-of-text token or is cut.

    The id ``vocab_size``, which no token has, marks padding. Lamina drops rows with fewer than two tokens. ``cut``
    counts the tokens that Lamina has cut off.
    """

    def __init__(self, encoder: TextEncoder, sequence_length: int):
        super().__init__(encoder)
        self.sequence_length, self.cut = sequence_length, 0

    def encode(self) -> np.ndarray:
        """Return the rows of the segments that were added since the last call, as an array [rows * sequence_length]."""
        shape, padding = (len(self._texts), self.sequence_length), self.encoder.vocab_size
        rows = np.full(shape, padding, dtype=self.encoder.padded_dtype)
        for row, ids in zip(rows, self.encoder.encode(self._texts) if self._texts else (), strict=True):
            ids = np.concatenate([ids, self._end])
            self.cut += max(0, len(ids) - len(row))
            row[: len(ids)] = ids[: len(row)]
        self._texts, self._breaks, self.chars = [], [], 0
        return rows[rows[:, 1] != padding].ravel()
