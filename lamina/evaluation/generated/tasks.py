"""The generators: each makes one item with one right answer, checked by how it is made."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lamina.evaluation.generated.passages import BOOKS, Passages, words_of

CHOICES = 4


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question.

    Attributes:
        question: what the model reads.
        choices: different answers.
        answer: the index of the right one.
    """

    question: str
    choices: tuple[str, ...]
    answer: int


Make = Callable[[random.Random, Passages], Item]
_makers: dict[str, Make] = {}
NAMES: dict[str, str] = {}
"""Each task's name, and its heading in a table."""
CHANCES: dict[str, float] = {}
"""By a task's name without ``lamina_``, the share that guessing gets right."""


def _task(name: str, heading: str, choices: int = CHOICES) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        _makers[f"lamina_{name}"] = make
        NAMES[f"lamina_{name}"] = heading
        CHANCES[name] = 1 / choices
        return make

    return register


def make(task: str, rng: random.Random, source: Passages) -> Item:
    """One item of a task, drawn from the source."""
    item = _makers[task](rng, source)
    assert len(set(item.choices)) == len(item.choices)
    return item


def _shuffled(rng: random.Random, question: str, right: str, wrong: list[str]) -> Item:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return Item(question=question, choices=tuple(choices), answer=choices.index(right))


@_task("continuation", "Continuation")
def continuation(rng: random.Random, source: Passages) -> Item:
    """How a sentence goes on; the wrong endings are other sentences' (HellaSwag's question)."""
    first, right = _halves(rng, source)
    wrong: list[str] = []
    while len(wrong) < CHOICES - 1:
        _, other = _halves(rng, source)
        if other not in (right, *wrong) and 0.5 < len(other) / len(right) < 2.0:
            wrong.append(other)
    return _shuffled(rng, f"How does this sentence go on? {first}", right, wrong)


def _halves(rng: random.Random, source: Passages) -> tuple[str, str]:
    words = rng.choice(source.sentences).split()
    at = len(words) // 2
    return " ".join(words[:at]), " ".join(words[at:])


@_task("blank", "Blank")
def blank(rng: random.Random, source: Passages) -> Item:
    """Which word was left out; the wrong ones are as frequent as the corpus has them (LAMBADA's question)."""
    while True:
        sentence = rng.choice(source.sentences)
        if words := [word for word in words_of(sentence) if sentence.count(word) == 1]:
            break
    right = rng.choice(words)
    wrong: list[str] = []
    while len(wrong) < CHOICES - 1:
        other = rng.choice(source.words)
        if other not in (right, *wrong) and other not in sentence:
            wrong.append(other)
    return _shuffled(rng, f"Which word fits? {sentence.replace(right, '___')}", right, wrong)


@_task("contains", "Contains", choices=2)
def contains(rng: random.Random, source: Passages) -> Item:
    """Whether a sentence holds a word, yes and no equally often (BoolQ's form)."""
    sentence = ""
    while not words_of(sentence):
        sentence = rng.choice(source.sentences)
    inside = rng.random() < 0.5
    word = rng.choice(words_of(sentence))
    while not inside and word in sentence:
        word = rng.choice(source.words)
    return Item(
        question=f'{sentence} Does this sentence contain the word "{word}"?', choices=("no", "yes"), answer=int(inside)
    )


@_task("book", "Book")
def book(rng: random.Random, source: Passages) -> Item:
    """Which book a sentence is from, the books equally often (a question of knowledge, as ARC's)."""
    right = rng.choice(list(source.books))
    sentence = rng.choice(source.books[right])
    wrong = rng.sample([title for title in BOOKS if title != right], CHOICES - 1)
    return _shuffled(rng, f"Which book is this sentence from? {sentence}", right, wrong)


@_task("order", "Order")
def order(rng: random.Random, source: Passages) -> Item:
    """Which order of a sentence's four parts is the right one."""
    while True:
        words = rng.choice(source.sentences).split()
        parts = [" ".join(words[at * len(words) // 4 : (at + 1) * len(words) // 4]) for at in range(4)]
        if len(words) >= 8 and len(set(parts)) == 4:
            break
    labels = dict(zip(rng.sample("ABCD", 4), parts, strict=True))
    right = " ".join(labels)
    wrong: list[str] = []
    while len(wrong) < CHOICES - 1:
        other = " ".join(rng.sample("ABCD", 4))
        if other not in (right, *wrong):
            wrong.append(other)
    shown = " ".join(f"{label}: {labels[label]}" for label in "ABCD")
    return _shuffled(rng, f"Which order is right? {shown}", right, wrong)


@_task("arithmetic", "Arithmetic")
def arithmetic(rng: random.Random, source: Passages) -> Item:
    """The sum or difference of two two-digit numbers; the wrong ones are off by 1, 2 or 10."""
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    first, second = max(first, second), min(first, second)
    plus = rng.random() < 0.5
    right = first + second if plus else first - second
    wrong = rng.sample([right + off for off in (-10, -2, -1, 1, 2, 10) if right + off >= 0], CHOICES - 1)
    return _shuffled(rng, f"{first} {'+' if plus else '-'} {second} =", str(right), [str(value) for value in wrong])


@_task("sorting", "Sorting")
def sorting(rng: random.Random, source: Passages) -> Item:
    """Five different letters in alphabetical order; the wrong answers have two neighbors swapped."""
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 5)
    right = sorted(letters)
    wrong = []
    for at in rng.sample(range(4), CHOICES - 1):
        swapped = [*right]
        swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
        wrong.append(" ".join(swapped))
    return _shuffled(rng, f"Sort the letters: {' '.join(letters)}", " ".join(right), wrong)
