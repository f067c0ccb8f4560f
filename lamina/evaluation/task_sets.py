"""The papers' sets of evaluation tasks: the tasks, their metrics, and the numbers of few-shot examples."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamina.errors import UserError

GENERATED = "generated"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A column of the results table: a task, and the metric to print."""

    task: str  # the name of a task of lm-evaluation-harness, or of a generated task
    num_fewshot: int | None = None  # the number of examples before each question, or None for the task's default
    metric: str | None = None  # the metric to print, or None for the task's main metric
    heading: str = ""  # the column's heading, or "" for the task's name

    @property
    def unit(self) -> str:
        """Return the task's name with the number of examples, such as ``hellaswag@5``."""
        return self.task if self.num_fewshot is None else f"{self.task}@{self.num_fewshot}"

    @property
    def title(self) -> str:
        return self.heading or self.unit


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """The columns of a paper's table, from left to right, and the table's source."""

    columns: tuple[Wanted, ...]
    source: str


SETS: dict[str, TaskSet] = {
    "fusenorm": TaskSet(
        columns=(
            Wanted(task="wikitext", metric="word_perplexity", heading="Wiki. ppl"),
            Wanted(task="lambada_openai", metric="perplexity", heading="LMB. ppl"),
            Wanted(task="lambada_openai", metric="acc", heading="LMB. acc"),
            Wanted(task="piqa", metric="acc", heading="PIQA"),
            Wanted(task="hellaswag", metric="acc_norm", heading="Hella."),
            Wanted(task="sciq", metric="acc", heading="SciQ"),
            Wanted(task="arc_challenge", metric="acc_norm", heading="ARC-c"),
            Wanted(task="winogrande", metric="acc", heading="Wino."),
        ),
        source="FuseNorm, Tables 1 to 3 (zero-shot, because the paper states no number of examples)",
    ),
    "peri_ln": TaskSet(
        columns=(
            Wanted(task="arc_easy", metric="acc", heading="ARC-Easy"),
            Wanted(task="hellaswag", metric="acc", heading="HellaSwag"),
            Wanted(task="piqa", metric="acc", heading="PIQA"),
            Wanted(task="social_iqa", metric="acc", heading="SIQA"),
            Wanted(task="winogrande", metric="acc", heading="Winogrande"),
        ),
        source="Peri-LN, Table 1 and J.1 (zero-shot, because the paper states no number of examples)",
    ),
    "mix_ln": TaskSet(
        columns=(
            Wanted(task="mmlu", num_fewshot=5, metric="acc", heading="MMLU"),
            Wanted(task="boolq", num_fewshot=5, metric="acc", heading="BoolQ"),
            Wanted(task="arc_easy", num_fewshot=5, metric="acc", heading="ARC-e"),
            Wanted(task="piqa", num_fewshot=5, metric="acc", heading="PIQA"),
            Wanted(task="hellaswag", num_fewshot=5, metric="acc", heading="Hellaswag"),
            Wanted(task="openbookqa", num_fewshot=5, metric="acc", heading="OBQA"),
            Wanted(task="winogrande", num_fewshot=5, metric="acc", heading="Winogrande"),
        ),
        source="Mix-LN, Table 2 (five examples, as in the script of OwLore, on which the paper builds)",
    ),
    "keel": TaskSet(
        columns=(
            Wanted(task="mmlu", metric="acc", heading="MMLU"),
            Wanted(task="cmmlu", metric="acc", heading="CMMLU"),
            Wanted(task="gsm8k", metric="exact_match", heading="GSM-8K"),
            Wanted(task="humaneval", metric="pass@1", heading="HumanEval"),
            Wanted(task="mbpp", metric="pass_at_1", heading="MBPP"),
            Wanted(task="arc_easy", metric="acc", heading="ARC-e"),
            Wanted(task="arc_challenge", metric="acc_norm", heading="ARC-c"),
            Wanted(task="hellaswag", metric="acc_norm", heading="HellaSwag"),
            Wanted(task="lambada_openai", metric="acc", heading="LAMBADA"),
            Wanted(task="agieval", metric="acc", heading="AGI-Eval"),
        ),
        source="Keel, the tasks in the paper's summary (with the harness's default number of examples)",
    ),
}


def columns_of(names: Sequence[str], num_fewshot: int | None = None) -> list[Wanted]:
    """Convert names of tasks and sets to columns. ``hellaswag@5`` and ``num_fewshot`` set the number of examples."""
    from lamina.evaluation.generated import NAMES

    generated = tuple(Wanted(task=task, num_fewshot=0, metric="acc", heading=title) for task, title in NAMES.items())
    sets = {name: each.columns for name, each in SETS.items()} | {GENERATED: generated}
    wanted: list[Wanted] = []
    for name in names:
        task, at, shots = name.partition("@")
        if at and not re.fullmatch(r"\d{1,3}", shots):
            raise UserError(
                f"tasks: {name!r}: {shots!r} is not a number of examples. Write TASK, or TASK@5 for five examples."
            )
        columns = sets.get(task, (Wanted(task=task),))
        wanted += [replace(column, num_fewshot=int(shots)) for column in columns] if at else columns
    if num_fewshot is not None:
        wanted = [replace(column, num_fewshot=num_fewshot) for column in wanted]
    return list(dict.fromkeys(wanted))


def listing(*, full: bool = False) -> str:
    """Return a line for each set of tasks. If ``full`` is true, also list the tasks of each set."""
    from lamina.evaluation.generated import NAMES

    rows = [
        (name, tasks.source, dict.fromkeys(column.unit for column in tasks.columns)) for name, tasks in SETS.items()
    ]
    exact = f"{len(NAMES)} tasks with exact answers, which Lamina makes from the embedded corpus (no download)"
    lines = []
    for name, source, units in [*rows, (GENERATED, exact, NAMES)]:
        lines.append(f"  {name:<10} {source}")
        if full:
            lines += textwrap.wrap(", ".join(units), 100, initial_indent=" " * 13, subsequent_indent=" " * 13)
    return "\n".join(lines)
