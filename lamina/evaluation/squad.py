"""Compute a question-answering model's F1 score on a local file in SQuAD's format."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.errors import UserError

_LONGEST = 30  # maximum tokens of an answer, as in BERT's script
_STRIDE, _LENGTH = 128, 384  # tokens that two windows have in common, and tokens of a window, as in BERT's script


@dataclass(frozen=True)
class Question:
    """A question about a text, with its right answers."""

    text: str
    context: str
    answers: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """Read a file in SQuAD v1.1's format. Raises UserError for another format, or for a question without an answer."""
    if not path.expanduser().is_file():
        raise UserError(f"squad: {str(path)!r}: no such file")
    try:
        data = json.loads(path.expanduser().read_text(encoding="utf-8"))
        questions = [
            Question(str(item["question"]), str(part["context"]), tuple(str(each["text"]) for each in item["answers"]))
            for article in data["data"]
            for part in article["paragraphs"]
            for item in part["qas"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"squad: {str(path)!r} is not in SQuAD's format: {type(error).__name__}: {error}. Give a file with "
            "the fields data, paragraphs, context, qas, question, answers and text."
        ) from None
    if not questions or not all(question.answers for question in questions):
        raise UserError(
            f"squad: {str(path)!r} has no questions, or a question without an answer. Give a SQuAD v1.1 file."
        )
    return questions


def f1(prediction: str, truth: str) -> float:
    """Return the F1 score of SQuAD v1.1 over the words of two answers, ignoring case, punctuation and articles."""
    found, true = _words(prediction), _words(truth)
    same = sum((Counter(found) & Counter(true)).values())
    return 2 * same / (len(found) + len(true)) if same else 0.0


def _words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def f1_scores(model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: list[Question]) -> list[float]:
    """Return each question's F1 score (0 to 1). With several right answers, the highest F1 score counts."""
    found = (answer(model, tokenizer, question) for question in questions)
    return [max(f1(text, truth) for truth in q.answers) for text, q in zip(found, questions, strict=True)]


@torch.no_grad()
def answer(model: nn.Module, tokenizer: PreTrainedTokenizerBase, question: Question) -> str:
    """Return the span of at most 30 tokens with the largest sum of start logit and end logit."""
    # windows of 384 tokens that share 128 tokens with the next window
    best = max(_spans(model, tokenizer, question), default=(0.0, 0, 0))
    return question.context[best[1] : best[2]]


def _spans(model: nn.Module, tokenizer: PreTrainedTokenizerBase, question: Question) -> Iterator[tuple]:
    """Yield the best span of each window, as (score, first character, last character)."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", _LENGTH)
    length = min(_LENGTH, int(most))
    encoded = tokenizer(
        *(question.text, question.context),
        truncation="only_second",
        max_length=length,
        stride=min(_STRIDE, length // 4),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    device = next(model.parameters()).device
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
    for window, offsets in enumerate(encoded["offset_mapping"]):
        output = model(**{name: torch.tensor([encoded[name][window]], device=device) for name in names})
        inside = [at for at, part in enumerate(encoded.sequence_ids(window)) if part == 1]
        if not inside:
            continue
        start, end = output.start_logits[0, inside].float(), output.end_logits[0, inside].float()
        scores = start[:, None] + end
        scores = scores.where(torch.ones_like(scores).triu().tril(_LONGEST - 1) > 0, -math.inf)
        first, last = divmod(int(scores.argmax()), len(inside))
        yield float(scores[first, last]), offsets[inside[first]][0], offsets[inside[last]][1]
