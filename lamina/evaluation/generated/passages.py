"""The embedded corpus as what the generated tasks are made of: sentences, each of a known book."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from lamina.data.corpus import EmbeddedCorpus
from lamina.data.split import count_chars, piece_chars, split_corpus
from lamina.data.tokenizers import EVAL_FRACTION

# Each book's title, and how its first paragraph begins.
BOOKS = {
    "Emma": "Emma Woodhouse, handsome",
    "Mansfield Park": "About thirty years ago Miss Maria Ward",
    "Northanger Abbey": "No one who had ever seen Catherine Morland",
    "Persuasion": "Sir Walter Elliot, of Kellynch Hall",
    "Pride and Prejudice": "It is a truth universally acknowledged",
    "Sense and Sensibility": "The family of Dashwood had long been settled",
    "Moby-Dick": "Call me Ishmael",
}
SHORTEST, LONGEST = 40, 160  # characters of a sentence


@dataclass(frozen=True, kw_only=True)
class Passages:
    """The sentences that items are drawn from.

    Attributes:
        books: each book's sentences, in its order.
        sentences: those of all books.
        words: every word of four lower-case letters and more, as often as it occurs.
    """

    books: Mapping[str, Sequence[str]]
    sentences: tuple[str, ...]
    words: tuple[str, ...]


@cache
def passages(*, held_out: bool) -> Passages:
    """The sentences of the part that `lamina pretrain` holds out of the corpus by default, or of the rest."""
    corpus = EmbeddedCorpus()
    chars = piece_chars(count_chars(corpus))
    book, books = "", {title: list[str]() for title in BOOKS}
    for segment in split_corpus(corpus, chars, EVAL_FRACTION):
        for line in segment.text.splitlines():
            book = next((title for title, opening in BOOKS.items() if line.startswith(opening)), book)
            if segment.held_out == held_out and book:
                books[book] += _sentences(line)
    texts = tuple(dict.fromkeys(text for listed in books.values() for text in listed))
    return Passages(books=books, sentences=texts, words=tuple(word for text in texts for word in words_of(text)))


def words_of(text: str) -> list[str]:
    """The words of four lower-case letters and more: no names."""
    return re.findall(r"(?<![\w'-])[a-z]{4,}(?![\w'-])", text)


def _sentences(line: str) -> Iterable[str]:
    """The sentences of useful length; dialog and abbreviations may cut one short."""
    for sentence in re.split(r"(?<=[a-z][.!?])\s+(?=[A-Z])", line):
        text = " ".join(sentence.split())
        if SHORTEST <= len(text) <= LONGEST and text.isascii():
            yield text
