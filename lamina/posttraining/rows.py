"""The numbered rows of a file, a data set or the generated tasks, without those that can't be used."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from lamina.core.json_types import Json
from lamina.core.values import home
from lamina.data.sources import hub_datasets
from lamina.data.sources.file_documents import NotTextError, inner_suffix, open_text
from lamina.errors import UserError, unknown
from lamina.evaluation.generated import NAMES, cached

logger = logging.getLogger(__name__)

T = TypeVar("T")
Fields = Mapping[str, Any]
GENERATED = "generated:"
ALLOWED_GENERATED = "generated:KIND[:TASK[+TASK...]][@test]"
ALLOWED = f"a .jsonl or .json file, also .gz, .xz or .zst, hf:NAME[:CONFIG][@SPLIT], or {ALLOWED_GENERATED}"


@dataclass(frozen=True, kw_only=True)
class Usable(Generic[T]):
    """The examples of a source.

    Attributes:
        items: in the order of the rows.
        skipped: how many rows were left out.
    """

    items: list[T]
    skipped: int


def read(name: str, source: str, use: Callable[[Fields], T], *, skip_bad: bool) -> Usable[T]:
    """Read a source and return what ``use`` makes of each row.

    Args:
        name: of the setting, for the messages.
        source: a file, hf:NAME, or generated:KIND.
        use: raises ValueError with the reason why a row can't be used.
        skip_bad: whether to leave such rows out and count them.

    Raises:
        UserError: with the line's number (in a list, the row's), for a row that is not JSON or can't be used; for a
            source that can't be read or has no usable row.
    """
    items: list[T] = []
    skipped = 0
    lines = not source.startswith((hub_datasets.PREFIX, GENERATED)) and inner_suffix(Path(source)) != ".json"
    noun = "line" if lines else "row"  # the rows of a list may stand on any line
    for number, row in _rows(name, source):
        try:
            items.append(use(_object(row)))
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            if not skip_bad:
                where = f"{name}: {source!r}, {noun} {number}"
                raise UserError(f"{where}: {error} (--skip-bad leaves such {noun}s out)") from None
            skipped += 1
    if skipped:
        logger.warning("%s: %s: %d of %d rows left out", name, source, skipped, skipped + len(items))
    if not items:
        raise UserError(f"{name}: {source!r} has no usable row")
    return Usable(items=items, skipped=skipped)


def _rows(name: str, source: str) -> Iterator[tuple[int, object]]:
    """The rows with their numbers from 1; of a file of lines, as text."""
    try:
        if source.startswith(GENERATED):
            yield from enumerate(generated_rows(name, source), start=1)
        elif hub_datasets.is_hub(source):
            data = hub_datasets.load(hub_datasets.parse(source))
            yield from enumerate((dict(row) for row in data), start=1)
        else:
            yield from _file_rows(name, source, home(name, source))
    except NotTextError as error:
        raise UserError(f"{name}: {source!r} {error}") from None
    except UserError as error:  # a reader of corpora says it of a corpus
        raise UserError(str(error).replace("corpus:", f"{name}:", 1)) from None


def _file_rows(name: str, source: str, path: Path) -> Iterator[tuple[int, object]]:
    if not path.is_file():
        raise UserError(f"{name}: {source!r}: no such file (allowed: {ALLOWED})")
    if (suffix := inner_suffix(path)) not in (".jsonl", ".ndjson", ".json"):
        raise UserError(f"{name}: {source!r} ends in {suffix or 'nothing'} (allowed: {ALLOWED})")
    with open_text(path) as file:
        if suffix != ".json":
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            return
        try:
            whole = json.load(file)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: {str(path)!r}: not JSON ({error})") from None
    if not isinstance(whole, list):
        raise UserError(f"{name}: {str(path)!r} holds no list of rows (allowed: {ALLOWED})")
    yield from enumerate(whole, start=1)


def _object(row: object) -> Fields:
    """A row as a mapping; raises ValueError for another value, and for text that is no JSON object."""
    try:
        value = json.loads(row) if isinstance(row, str) else row
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def generated_rows(name: str, source: str) -> Iterator[Json]:
    """Make the rows of ``generated:KIND[:TASK[+TASK...]][@test]``: of all tasks, unless some are named, mixed.

    ``answers`` have a prompt and its completion, in the words that an evaluation asks with. ``preferences`` have a
    prompt, the right answer as the chosen one, and as the rejected one another answer or the right one's words in
    another order. Raises UserError, about the setting ``name``, for another kind, task or part.
    """
    kind, _, rest = source.removeprefix(GENERATED).partition("@")[0].partition(":")
    split = source.partition("@")[2] or "train"
    if kind not in _KINDS:
        raise unknown(f"kind of {name}", kind, _KINDS)
    if split not in ("train", "test"):
        raise UserError(f"{name}: {source!r} (allowed: {ALLOWED_GENERATED})")
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
    """Shuffle the words; None for fewer than three, which hardly have another order."""
    moved = list(words)
    draw.shuffle(moved)
    return " ".join(moved) if len(words) > 2 and moved != list(words) else None


_KINDS: dict[str, Callable[[Json, random.Random], Json]] = {"answers": _answer, "preferences": _preference}
