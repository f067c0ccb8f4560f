"""`lamina eval MODEL...`: perplexity, and the tasks of lm-evaluation-harness."""

from __future__ import annotations

import textwrap
from pathlib import Path

from lamina.commands.arguments import Parser
from lamina.errors import UserError
from lamina.evaluation.settings import EvalSettings

EXAMPLES = """
  lamina eval runs/keel-64 --corpus my_text.txt
  lamina eval runs/keel-64 runs/pre-64 --tasks generated --output runs/scores
  lamina eval models/smollm2 --tasks peri_ln --limit 200 --data-dir eval-data
  lamina eval models/smollm2 --tasks arc_easy,hellaswag@5 --output runs/smollm2
  lamina eval runs/compare --tasks peri_ln --data-dir eval-data --output runs/peri --resume=auto
  lamina eval --list
"""
DESCRIPTION = """\
What trained models can do: the perplexity of any text per token, word and byte (--corpus), and the tasks of
lm-evaluation-harness (--tasks). MODEL is a Lamina or transformers checkpoint, a run's folder, or a study's, whose runs
become a mean and a standard deviation over the seeds. OUTPUT/report.html is the page; table.csv, table.md and table.tex
hold the table as the papers print it, results.csv every number, items/ every question.

--tasks takes any task, group or tag of the harness, and these sets:
"""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser("eval", DESCRIPTION + listing(), EXAMPLES, "MODEL... ")
    flags.add_settings(EvalSettings, positional=("models...",))
    flags.add_argument("--list", action="store_true", help="list the sets with their tasks, and exit")
    flags.add_output_modes("evaluate only what is not finished")
    return flags


def run(argv: list[str]) -> int:
    """Parse, evaluate, write the page, print the table and the page's path."""
    typed, others = parser().settings_from(argv)
    if others.list:
        print(listing(full=True))
        return 0
    if not typed.get("models"):
        typed.pop("models", None)
    else:
        typed["models"] = joined(typed["models"])
    folder = Path(typed.get("output", EvalSettings.output))
    from lamina.api import evaluate
    from lamina.reports import terminal

    result = evaluate(**typed, resume=others.resume, overwrite=others.overwrite)
    print(terminal.evaluation(folder, result))
    return 0


def joined(models: list[str] | str) -> str:
    """Several models as one setting. Raises UserError for a path with a comma, which separates them in files."""
    listed = [models] if isinstance(models, str) else models
    for model in listed:
        if len(listed) > 1 and "," in model:
            raise UserError(f"models: {model!r} has a comma (allowed: paths without, several with spaces between)")
    return ",".join(listed)


def listing(*, full: bool = False) -> str:
    """The sets of tasks, one line each; with ``full``, also their tasks. Does not load torch."""
    from lamina.evaluation.task_sets import GENERATED, SETS

    lines = []
    for name, one in SETS.items():
        lines.append(f"  {name:<10} {one.source}")
        if full:
            units = ", ".join(dict.fromkeys(column.unit for column in one.columns))
            lines += textwrap.wrap(units, 100, initial_indent=" " * 13, subsequent_indent=" " * 13)
    lines.append(f"  {GENERATED:<10} seven tasks with exact answers made from the embedded corpus, without a network")
    return "\n".join(lines)
