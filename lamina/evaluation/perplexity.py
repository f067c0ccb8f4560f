"""Compute the perplexity of a text per token, word and byte, with a sliding window."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.data.blocks import perplexity as exp
from lamina.data.corpus import Corpus
from lamina.data.encoding import TextEncoder, known
from lamina.errors import UserError
from lamina.modeling.processes import ALONE, Processes

UNSCORED = -100  # cross_entropy's ignore_index
ROWS = 1024  # the number of predictions that are converted to float64 at a time


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The total loss on a text, and the numbers of tokens, words and bytes in the text."""

    nll: float  # the negative log-likelihood of the whole text, in nats
    tokens: int  # the number of scored tokens
    # the number of words, counted as in lm-evaluation-harness by splitting at white space. White space at the text's
    # beginning or end adds an empty word
    words: int
    bytes: int  # the number of UTF-8 bytes of the scored tokens
    documents: int  # the number of documents. Lamina scores each document separately
    notes: Sequence[str] = ()

    def numbers(self) -> dict[str, float]:
        """Return the perplexity per token, word and byte, the loss in nats per token, and the bits per byte."""
        return {
            "token_perplexity": exp(self.nll / self.tokens),
            "word_perplexity": exp(self.nll / self.words),
            "byte_perplexity": exp(self.nll / self.bytes),
            "bits_per_byte": self.nll / self.bytes / math.log(2.0),
            "loss": self.nll / self.tokens,
        }


Window: TypeAlias = tuple[list[int], list[int]]
"""The tokens that the model reads, and the tokens that the model should predict at the last positions."""


def windows(tokens: list[int], prefix: int, window: int, stride: int) -> Iterator[Window]:
    """Cut a document into windows that score every token once. ``prefix`` is the first token of the first window.

    The first window scores ``window`` tokens. Each further window scores the next ``stride`` tokens, with at least
    ``window - stride`` tokens of context. If ``window`` and ``stride`` are equal, the windows are the same as in the
    rolling log-likelihood of lm-evaluation-harness.
    """
    ids = [prefix, *tokens]
    done = 0
    while done < len(tokens):
        end = min(len(tokens), window if done == 0 else done + stride)
        begin = max(0, end - window)
        yield ids[begin:end], tokens[done:end]
        done = end


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    window: int,
    stride: int,
    batch_size: int = 8,
    share: int | None = None,
    processes: Processes = ALONE,
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Score each text separately, and sum the losses.

    Args:
        model: a causal language model in evaluation mode, from [batch, tokens] to logits [batch, tokens, vocab_size].
        tokenizer: the model's tokenizer. The tokenizer's beginning-of-text (or end-of-text) token precedes each text.
        window: the number of tokens that the model reads at once.
        stride: the number of tokens by which the window moves.
        batch_size: the number of windows per forward pass.
        share: the number of consecutive windows that a process takes at a time (default: ``batch_size``).
        processes: the processes over which Lamina splits the text. The number of processes does not change the loss.
        progress: a function to call with the number of newly scored tokens.

    Raises:
        UserError: no text has tokens, the tokenizer has no beginning-of-text or end-of-text token, or the loss is not
            finite.
    """
    notes, encoder = list[str](), TextEncoder(tokenizer)
    first = _first(model, tokenizer, notes)
    counts = {"tokens": 0, "words": 0, "bytes": 0, "documents": 0}

    def all_windows() -> Iterator[Window]:
        for text in texts:
            before, tokens, unscored = _tokens(text, tokenizer, encoder, first)
            counts["tokens"] += len(tokens)
            counts["words"] += len(re.split(r"\s+", text))
            counts["bytes"] += len(text.encode()) - unscored
            counts["documents"] += 1
            yield from windows(tokens, before, window, stride)

    windows_left, number, losses = all_windows(), 0, []
    while taken := list(islice(windows_left, share or batch_size)):
        for at in range(0, len(taken), batch_size) if number % processes.size == processes.rank else ():
            batch = taken[at : at + batch_size]
            losses.append((number, _nll(model, batch, first or 0)))
            if progress is not None:
                progress(sum(len(targets) for _, targets in batch))
        number += 1
    total = 0.0
    for _, nll in sorted((pair for part in processes.everyones(losses) for pair in part), key=itemgetter(0)):
        total += nll
    if not counts["tokens"]:
        raise UserError("corpus: the text has no tokens. Give a text that is not empty.")
    if not math.isfinite(total):
        raise UserError(
            f"corpus: the model's loss on this text is {total}. Check the model's weights, or try --dtype float32."
        )
    return Perplexity(nll=total, **counts, notes=notes)


def _first(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> int | None:
    """Return the token that precedes each text, or None (with a note) if the vocabulary lacks this token."""
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(prefix, int):
        raise UserError(
            "tokenizer: the tokenizer has no beginning-of-text or end-of-text token. Choose another tokenizer."
        )
    first = known(prefix, getattr(model.config.get_text_config(), "vocab_size", None), "corpus", notes)
    if first is None:
        notes.append("corpus: Lamina does not score the first token of each text")
    return first


def _tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, encoder: TextEncoder, first: int | None
) -> tuple[int, list[int], int]:
    """Return the token before the scored tokens, the scored tokens, and the number of bytes that are not scored."""
    if first is not None:
        return first, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], 0
    ids = encoder.encode([text])[0].tolist()
    unscored = len(ids[:1]) if encoder.is_bytes else len(str(tokenizer.decode(ids[:1])).encode())
    return ids[0] if ids else 0, ids[1:], unscored


def _nll(model: PreTrainedModel, batch: list[Window], padding: int) -> float:
    """Return the total loss of a batch of windows in nats. The padding of short windows has no effect."""
    longest = max(len(read) for read, _ in batch)
    inputs = torch.full((len(batch), longest), padding)
    labels = torch.full((len(batch), longest), UNSCORED)
    for row, (read, targets) in enumerate(batch):
        size = len(read)
        inputs[row, :size] = torch.tensor(read)
        labels[row, size - len(targets) : size] = torch.tensor(targets)
    scored = labels != UNSCORED
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
    exact = torch.float32 if logits.device.type == "mps" else torch.float64  # mps has no float64
    rows = zip(logits[scored.to(logits.device)].split(ROWS), labels[scored].to(logits.device).split(ROWS), strict=True)
    return sum(float(F.cross_entropy(chosen.to(exact), ids, reduction="sum")) for chosen, ids in rows)


def documents_of(corpus: str, text_field: str, limit: int | None) -> Iterator[str]:
    """Return at most ``limit`` texts of a corpus. Raises UserError if Lamina can't read the corpus."""
    parsed = Corpus.parse(corpus, text_field)
    if len(parsed.parts) > 1:
        raise UserError(f"corpus: {corpus!r} is a mix of corpora. Evaluate each corpus separately.")
    every = (document.text for part in parsed.parts for document in part.corpus.documents())
    return islice(every, limit)
