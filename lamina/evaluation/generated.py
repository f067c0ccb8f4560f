"""Seven multiple-choice tasks with exact answers, which Lamina makes from the built-in corpus without a network."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from lamina.core.values import real_path
from lamina.data.cache import cache_root, publish
from lamina.data.corpus import EmbeddedCorpus
from lamina.data.split import count_chars, is_held_out, piece_chars, split_documents
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
SHORTEST, LONGEST = 40, 160  # in characters, for a sentence


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Sentences for the generated tasks. ``words`` repeats each word as often as the word occurs in the sentences."""

    books: Mapping[str, Sequence[str]]
    sentences: tuple[str, ...]
    words: tuple[str, ...]


@cache
def passages(*, held_out: bool) -> Passages:
    """Return the built-in corpus's sentences that `lamina pretrain` holds out by default, or all other sentences."""
    corpus = EmbeddedCorpus()
    chars = piece_chars(count_chars(corpus))
    book, books = "", {title: list[str]() for title in BOOKS}
    for segment in split_documents(corpus.documents(), chars):
        for line in segment.text.splitlines():
            book = next((title for title, opening in BOOKS.items() if line.startswith(opening)), book)
            if is_held_out(segment.piece, EVAL_FRACTION) == held_out and book:
                books[book] += _sentences(line)
    texts = tuple(dict.fromkeys(text for listed in books.values() for text in listed))
    return Passages(books=books, sentences=texts, words=tuple(word for text in texts for word in words_of(text)))


def words_of(text: str) -> list[str]:
    """Return the words of at least four lower-case letters. Lamina skips names, which begin with a capital letter."""
    return re.findall(r"(?<![\w'-])[a-z]{4,}(?![\w'-])", text)


def _sentences(line: str) -> Iterable[str]:
    """Yield the sentences of 40 to 160 characters. An abbreviation's period may also end a sentence."""
    for sentence in re.split(r"(?<=[a-z][.!?])\s+(?=[A-Z])", line):
        text = " ".join(sentence.split())
        if SHORTEST <= len(text) <= LONGEST and text.isascii():
            yield text


CHOICES = 4


@dataclass(frozen=True, kw_only=True)
class Item:
    """A multiple-choice question with the index of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int


Make = Callable[[random.Random, Passages], Item]
_makers: dict[str, Make] = {}
NAMES: dict[str, str] = {}
"""The tasks' headings in a table, by the task's name."""
CHANCES: dict[str, float] = {}
"""The expected accuracy of random guessing, by the task's name without ``lamina_``."""


def _task(name: str, heading: str, choices: int = CHOICES) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        _makers[f"lamina_{name}"] = make
        NAMES[f"lamina_{name}"] = heading
        CHANCES[name] = 1 / choices
        return make

    return register


def _wrong(right: str, draw: Callable[[], str], fits: Callable[[str], bool] = lambda other: True) -> list[str]:
    wrong: list[str] = []
    while len(wrong) < CHOICES - 1:
        if (other := draw()) not in (right, *wrong) and fits(other):
            wrong.append(other)
    return wrong


def _shuffled(rng: random.Random, question: str, right: str, wrong: list[str]) -> Item:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return Item(question=question, choices=tuple(choices), answer=choices.index(right))


@_task("continuation", "Continuation")
def continuation(rng: random.Random, source: Passages) -> Item:
    """Ask how a sentence continues, with wrong endings from other sentences (as in HellaSwag)."""
    first, right = _halves(rng, source)
    wrong = _wrong(right, lambda: _halves(rng, source)[1], lambda other: 0.5 < len(other) / len(right) < 2.0)
    return _shuffled(rng, f"How does this sentence go on? {first}", right, wrong)


def _halves(rng: random.Random, source: Passages) -> tuple[str, str]:
    words = rng.choice(source.sentences).split()
    at = len(words) // 2
    return " ".join(words[:at]), " ".join(words[at:])


@_task("blank", "Blank")
def blank(rng: random.Random, source: Passages) -> Item:
    """Ask for the missing word of a sentence, with wrong words drawn by frequency (as in LAMBADA)."""
    while True:
        sentence = rng.choice(source.sentences)
        if words := [word for word in words_of(sentence) if sentence.count(word) == 1]:
            break
    right = rng.choice(words)
    wrong = _wrong(right, lambda: rng.choice(source.words), lambda other: other not in sentence)
    return _shuffled(rng, f"Which word fits? {sentence.replace(right, '___')}", right, wrong)


@_task("contains", "Contains", choices=2)
def contains(rng: random.Random, source: Passages) -> Item:
    """Ask whether a sentence contains a word. "Yes" and "no" are equally frequent (as in BoolQ)."""
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
    """Ask which book a sentence is from. All books are equally frequent."""
    right = rng.choice(list(source.books))
    sentence = rng.choice(source.books[right])
    wrong = rng.sample([title for title in BOOKS if title != right], CHOICES - 1)
    return _shuffled(rng, f"Which book is this sentence from? {sentence}", right, wrong)


@_task("order", "Order")
def order(rng: random.Random, source: Passages) -> Item:
    """Ask for the right order of a sentence's four parts."""
    while True:
        words = rng.choice(source.sentences).split()
        parts = [" ".join(words[at * len(words) // 4 : (at + 1) * len(words) // 4]) for at in range(4)]
        if len(words) >= 8 and len(set(parts)) == 4:
            break
    labels = dict(zip(rng.sample("ABCD", 4), parts, strict=True))
    right = " ".join(labels)
    wrong = _wrong(right, lambda: " ".join(rng.sample("ABCD", 4)))
    shown = " ".join(f"{label}: {labels[label]}" for label in "ABCD")
    return _shuffled(rng, f"Which order is right? {shown}", right, wrong)


@_task("arithmetic", "Arithmetic")
def arithmetic(rng: random.Random, source: Passages) -> Item:
    """Ask for the sum or difference of two-digit numbers, with wrong answers that are off by 1, 2 or 10."""
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    first, second = max(first, second), min(first, second)
    plus = rng.random() < 0.5
    right = first + second if plus else first - second
    wrong = rng.sample([right + off for off in (-10, -2, -1, 1, 2, 10) if right + off >= 0], CHOICES - 1)
    return _shuffled(rng, f"{first} {'+' if plus else '-'} {second} =", str(right), [str(value) for value in wrong])


@_task("sorting", "Sorting")
def sorting(rng: random.Random, source: Passages) -> Item:
    """Ask for five letters in alphabetical order, with wrong answers that swap two neighbors."""
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 5)
    right = sorted(letters)
    wrong = []
    for at in rng.sample(range(4), CHOICES - 1):
        swapped = [*right]
        swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
        wrong.append(" ".join(swapped))
    return _shuffled(rng, f"Sort the letters: {' '.join(letters)}", " ".join(right), wrong)


TRAIN, TEST = 4000, 500
# increase this number whenever the items change
_FORMAT = "generated-1"


def items(task: str, count: int, *, held_out: bool, seed: int = 0) -> list[Item]:
    """Draw different random items of a task. The same seed gives the same items.

    If ``held_out`` is true, the items come from text that `lamina pretrain` holds out. Otherwise, the items come from
    the other text, and never repeat a question of a held-out item.
    """
    source = passages(held_out=held_out)
    rng = random.Random(f"{task}|{held_out}|{seed}")
    questions = {item.question for item in items(task, TEST, held_out=True, seed=seed)} if not held_out else set()
    drawn: list[Item] = []
    while len(drawn) < count:
        item = _makers[task](rng, source)
        assert len(set(item.choices)) == len(item.choices)
        if item.question not in questions:
            questions.add(item.question)
            drawn.append(item)
    return drawn


def write(folder: Path, *, train: int = TRAIN, test: int = TEST, path: Path | None = None) -> None:
    """Write NAME/train.jsonl, NAME/test.jsonl and NAME.yaml for every task.

    A row has the fields ``question``, ``choices`` and ``answer`` (the index of the right choice). For fine-tuning, a
    row also has the fields ``instruction``, ``input`` and ``output``. The task files contain the folder's path. If you
    want to move the folder later, give the new path as ``path``.
    """
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    for task in NAMES:
        (folder / task).mkdir(parents=True, exist_ok=True)
        files = {}
        for split, count in (("train", train), ("test", test)):
            lines = []
            for item in items(task, count, held_out=split == "test"):
                tuning = {"instruction": item.question, "input": "", "output": item.choices[item.answer]}
                row = {"question": item.question, "choices": item.choices, "answer": item.answer, **tuning}
                lines.append(json.dumps(row) + "\n")
            (folder / task / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            files[split] = str(real_path(path or folder) / task / f"{split}.jsonl")
        config = {
            "task": task,
            "tag": "lamina_generated",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "output_type": "multiple_choice",
            "training_split": "train",
            "test_split": "test",
            "doc_to_text": "{{question}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": metrics,
            "metadata": {"version": 1.0},
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def version() -> str:
    """Return a hash that changes if the items change."""
    return hashlib.sha256(f"{_FORMAT}|{TRAIN}|{TEST}".encode()).hexdigest()[:32]


def cached() -> Path:
    """Return the folder of the generated tasks. The first call writes the folder. Raises the errors of ``publish``."""
    folder = real_path(cache_root()) / "tasks" / version()
    publish(folder, lambda draft: write(draft, path=folder))
    return folder
