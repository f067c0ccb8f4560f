"""The generated multiple-choice tasks as examples: answers to learn, and preferences between them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError, unknown
from lamina.evaluation.generated import NAMES, cached

PREFIX = "generated:"
ALLOWED = "generated:KIND[:TASK[+TASK...]][@test]"
SPLITS = ("train", "test")


def is_generated(source: str) -> bool:
    """Whether a source is generated rather than read."""
    return source.startswith(PREFIX)


def rows(name: str, source: str) -> Iterator[Json]:
    """The rows of ``generated:KIND[:TASK[+TASK...]][@test]``: of all tasks, unless some are named, mixed.

    ``answers`` have a prompt and its completion, in the words that an evaluation asks with. ``preferences`` have a
    prompt, the right answer as the chosen one, and as the rejected one another answer or the right one's words in
    another order. Raises UserError, about the setting ``name``, for another kind, task or part.
    """
    kind, _, rest = source.removeprefix(PREFIX).partition("@")[0].partition(":")
    split = source.partition("@")[2] or "train"
    if kind not in _KINDS:
        raise unknown(f"kind of {name}", kind, _KINDS)
    if split not in SPLITS:
        raise UserError(f"{name}: {source!r} (allowed: {ALLOWED})")
    tasks = [f"lamina_{task}" for task in rest.split("+")] if rest else list(NAMES)
    for task in tasks:
        if task not in NAMES:
            raise unknown(f"task of {name}", task.removeprefix("lamina_"), [one[7:] for one in NAMES])
    folder, draw = cached(), random.Random(source)
    items = [item for task in tasks for item in _items(folder / task / f"{split}.jsonl")]
    draw.shuffle(items)
    for item in items:
        yield {"prompt": f"{item['question']}\nAnswer:", **_KINDS[kind](item, draw)}


def _items(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _answer(item: Json, draw: random.Random) -> Json:
    return {"completion": f" {_right(item)}"}


def _preference(item: Json, draw: random.Random) -> Json:
    right, wrong = _right(item), draw.choice([text for text in item["choices"] if text != _right(item)])
    shuffled = _in_another_order(right.split(), draw) if draw.random() < 0.5 else None
    return {"chosen": f" {right}", "rejected": f" {shuffled or wrong}"}


def _right(item: Json) -> str:
    return item["choices"][item["answer"]]


def _in_another_order(words: Sequence[str], draw: random.Random) -> str | None:
    """The words in another order; None for fewer than three, which hardly have one."""
    moved = list(words)
    draw.shuffle(moved)
    return " ".join(moved) if len(words) > 2 and moved != list(words) else None


_KINDS: dict[str, Callable[[Json, random.Random], Json]] = {"answers": _answer, "preferences": _preference}
