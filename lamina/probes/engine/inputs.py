"""Make a model's inputs: blocks of tokens, images, or another kind of input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.data.blocks import Blocks, spread
from lamina.data.corpus import EMBEDDED, single_corpus
from lamina.data.encoding import TextEncoder, known
from lamina.errors import UserError
from lamina.probes.structure.token_rows import text_config, token_rows

Inputs: TypeAlias = Any  # texts, blocks [sequences, tokens], images, or a dataset of input_ids
NOISE = "noise"
_EVAL_FRACTION = 0.05
_CHARS_A_TOKEN = 12  # more than any tokenizer's: how much of a corpus is read


Reader: TypeAlias = Callable[[Inputs, str, nn.Module, int, int], torch.Tensor]
"""A function that returns items (images) from the user's input, a corpus, a model, the largest number and a seed."""


def images() -> Reader:
    from lamina.lab.vision.image_inputs import read_images

    return read_images


READERS: dict[str, Callable[[], Reader]] = {"pixel_values": images}
"""By the name of a model's main input: a function that imports and returns the ``Reader``."""


def reads_images(model: nn.Module) -> bool:
    return getattr(model, "main_input_name", "input_ids") == "pixel_values"


def batches_of(
    given: Inputs,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    corpus: str = EMBEDDED,
    text_field: str = "text",
    sequence_length: int | None = None,
    sequences: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    notes: list[str] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of the forward passes, from the user or from a corpus.

    Args:
        given: texts, token blocks [sequences, tokens] (a tensor, an array, lists or a dataset of input_ids), or images
            [images, channels, height, width]. By default, Lamina reads ``corpus``.
        sequence_length: the number of tokens per block, if the input is text
        sequences: the largest number of inputs (default: all)
        notes: a list for the note that Lamina drops the text's last, incomplete block

    Raises:
        UserError: if Lamina cannot read the input, the input is shorter than a block, or the model does not accept it
    """
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids" and reads not in READERS:
        raise UserError(f"model: {type(model).__name__} reads {reads}. Choose a model that reads text or images.")
    if reads in READERS:
        items = READERS[reads]()(given, corpus, model, sys.maxsize if sequences is None else sequences, seed)
        return [{reads: part} for part in items.split(batch_size)]
    length, size = _length(sequence_length, model), token_rows(model)
    listed = isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], str)
    texts = given is None or isinstance(given, str) or listed
    if texts:
        source = f"corpus {corpus!r}" if given is None else "texts_or_blocks"
        if given is None:
            given = _corpus_texts(corpus, text_field, sequences and length * sequences * _CHARS_A_TOKEN)
        blocks = _pack([given] if isinstance(given, str) else list(given), tokenizer, length, source, notes, size)
    else:
        blocks = _blocks(given, sys.maxsize if sequences is None else sequences)
    if size is not None and int(blocks.max()) >= size:
        fix = (
            "Name the tokenizer that the model was trained with: --tokenizer"
            if texts
            else f"Give ids from 0 to {size - 1}"
        )
        raise UserError(f"tokens: the id {int(blocks.max())} is outside the model's vocabulary of {size}. {fix}.")
    rows = spread(len(blocks), sequences or len(blocks))
    return [{"input_ids": part} for part in blocks[rows].split(batch_size)]


def _length(length: int | None, model: nn.Module) -> int:
    text = text_config(model)
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        positions = (m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and "position" in name)
        if getattr(text, "pad_token_id", None) is not None and any(m.padding_idx is not None for m in positions):
            limit -= text.pad_token_id + 1  # positions start after the padding's id, as RoBERTa's do
        if length is not None and length > limit:
            raise UserError(
                f"sequence_length: {length} is more than the model's {limit} positions. Choose at most {limit}."
            )
        return length or min(256, limit)
    return length or 256


def _corpus_texts(corpus: str, text_field: str, chars: int | None) -> list[str]:
    from lamina.data.split import count_chars, is_held_out, piece_chars, split_documents

    text = single_corpus(corpus, text_field)
    if chars is None:
        return [document.text for document in text.documents()]
    total = count_chars(text)
    fraction = _EVAL_FRACTION if total * _EVAL_FRACTION >= chars / 3 else 0.5
    held_out, rest, characters = [], [], 0
    for segment in split_documents(text.documents(), piece_chars(total)):
        apart = is_held_out(segment.piece, fraction)
        (held_out if apart else rest).append(segment.text)
        characters += len(segment.text) * apart
        if characters > 40 * chars:
            break
    return held_out if characters >= chars or not rest else held_out + rest


def _pack(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    length: int,
    source: str,
    notes: list[str] | None,
    size: int | None,
) -> torch.Tensor:
    """Pack the texts' tokens into blocks [blocks, length]. The tokenizer's special tokens surround each block."""
    if tokenizer is None:
        raise UserError(
            f"tokenizer: the checkpoint has no tokenizer, so Lamina cannot read {source}. Add --tokenizer FOLDER, or "
            "--tokenizer bytes for a model of bytes."
        )
    prefix, suffix = _specials(tokenizer)
    body = length - len(prefix) - len(suffix)
    if body < 1:
        raise UserError(
            f"sequence_length: {length} leaves no room for text beside {len(prefix) + len(suffix)} special tokens. "
            "Raise sequence_length."
        )
    end = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) and not suffix else None
    if end is not None:
        end = known(end, size, source, notes if len(texts) > 1 else None)
    encoder, stream = TextEncoder(tokenizer), list[int]()  # what looks like a special token in a text is text
    for start in range(0, len(texts), 256):
        for ids in encoder.encode(list(texts[start : start + 256])):
            stream += [*ids.tolist(), end] if end is not None and len(texts) > 1 else ids.tolist()
    count = len(stream) // body
    if not count:
        raise UserError(
            f"{source}: {len(stream)} tokens are fewer than a block of {body}. Give a longer text, or set "
            f"--sequence-length to at most {len(stream) + len(prefix) + len(suffix)}."
        )
    if (rest := len(stream) - count * body) and notes is not None:
        notes.append(f"{source}: Lamina drops the last {rest} of {len(stream):,} tokens, which do not fill a block")
    cut = torch.tensor(stream[: count * body]).view(count, body)
    before, after = (torch.tensor(ids, dtype=torch.long).expand(count, -1) for ids in (prefix, suffix))
    return torch.cat([before, cut, after], dim=1)


def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def _blocks(given: Inputs, sequences: int) -> torch.Tensor:
    if isinstance(given, Blocks):
        given = given.eval
    try:
        if isinstance(given, torch.Tensor | np.ndarray):
            blocks = torch.as_tensor(np.asarray(given).astype(np.int64) if isinstance(given, np.ndarray) else given)
            if blocks.is_floating_point():
                raise TypeError("token ids are integers")
        elif isinstance(given, Mapping):
            blocks = torch.as_tensor(given["input_ids"])
            if (mask := given.get("attention_mask")) is not None and not torch.as_tensor(mask).bool().all():
                raise ValueError("the texts are padded, and Lamina would measure the padding")
        else:
            rows = [given[i] for i in spread(len(given), sequences)]
            rows = [row["input_ids"] if isinstance(row, Mapping) else row for row in rows]
            blocks = torch.stack([torch.as_tensor(row) for row in rows])
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"texts_or_blocks: {' '.join(str(error).split())}. Give texts, token blocks [sequences, tokens] of one "
            "length, a dataset of input_ids, or images [images, channels, height, width]."
        ) from None
    if blocks.ndim != 2 or not blocks.numel():
        raise UserError(f"texts_or_blocks: the shape is {list(blocks.shape)}. Give token blocks [sequences, tokens].")
    if int(blocks.min()) < 0:
        raise UserError(f"texts_or_blocks: the token id {int(blocks.min())} is negative. Give ids of 0 and above.")
    return blocks.long()
