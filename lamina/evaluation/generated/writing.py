"""The generated tasks as files: JSONL with a training and a test part, and task files for lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import yaml

from lamina.data.cache import cache_root, is_whole, publish
from lamina.evaluation.generated.passages import passages
from lamina.evaluation.generated.tasks import NAMES, Item, make

TRAIN, TEST = 4000, 500
# increases whenever the items would be others
_FORMAT = "generated-1"


def items(task: str, count: int, *, held_out: bool, seed: int = 0) -> list[Item]:
    """Different items of a task, the same for the same seed.

    Items of the test part (``held_out``) are made of text that is held out of training, too. No question of the
    training part is among the test part's.
    """
    source = passages(held_out=held_out)
    rng = random.Random(f"{task}|{held_out}|{seed}")
    known = {item.question for item in items(task, TEST, held_out=True, seed=seed)} if not held_out else set()
    found: list[Item] = []
    while len(found) < count:
        item = make(task, rng, source)
        if item.question not in known:
            known.add(item.question)
            found.append(item)
    return found


def write(folder: Path, *, train: int = TRAIN, test: int = TEST, seed: int = 0, path: Path | None = None) -> None:
    """Write NAME/train.jsonl, NAME/test.jsonl and NAME.yaml for every task.

    A row has ``question``, ``choices``, ``answer`` (an index), and ``instruction``, ``input``, ``output`` for
    fine-tuning. ``path``: where the folder will be, which the task files name; by default where it is.
    """
    for task in NAMES:
        (folder / task).mkdir(parents=True, exist_ok=True)
        for split, count in (("train", train), ("test", test)):
            rows = [_row(item) for item in items(task, count, held_out=split == "test", seed=seed)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / task / f"{split}.jsonl").write_text(text, encoding="utf-8")
        place = (path or folder).resolve() / task
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(_config(task, place), sort_keys=False), encoding="utf-8")


def version() -> str:
    """A hash that changes whenever the items do: 32 hexadecimal digits."""
    return hashlib.sha256(f"{_FORMAT}|{TRAIN}|{TEST}".encode()).hexdigest()[:32]


def cached(cache_dir: Path | str | None = None) -> Path:
    """The folder with the generated tasks, made on the first call. Raises as ``publish`` does."""
    folder = cache_root(cache_dir).resolve() / "tasks" / version()
    if not is_whole(folder):
        publish(folder, lambda draft: write(draft, path=folder))
    return folder


def _row(item: Item) -> dict[str, object]:
    output = item.choices[item.answer]
    return {
        "question": item.question,
        "choices": list(item.choices),
        "answer": item.answer,
        "instruction": item.question,
        "input": "",
        "output": output,
    }


def _config(task: str, place: Path) -> dict[str, object]:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "task": task,
        "tag": "lamina_generated",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(place / f"{split}.jsonl") for split in ("train", "test")}},
        "output_type": "multiple_choice",
        "training_split": "train",
        "test_split": "test",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": metrics,
        "metadata": {"version": 1.0},
    }
