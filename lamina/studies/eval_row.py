"""The command `lamina eval` in Lamina's catalog of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from lamina.core.json_types import Json
from lamina.jobs.kinds import Kind
from lamina.jobs.row import Given, JobRow, Modes

if TYPE_CHECKING:
    from lamina.evaluation.settings import EvalSettings


def settings() -> type[EvalSettings]:
    from lamina.evaluation.settings import EvalSettings

    return EvalSettings


def evaluate(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.studies.evaluated import evaluate_runs

    return evaluate_runs(settings, **modes)


def listing(*, full: bool = False) -> str:
    from lamina.evaluation.task_sets import listing

    return listing(full=full)


EVAL = JobRow(
    name="eval",
    function="evaluate",
    kind=Kind.EVALUATION,
    summary=("evaluate models: perplexity on a text, and tasks of lm-evaluation-harness, in tables like the papers'"),
    about="""\
Evaluate trained models: their perplexity per token, word and byte on a text (--corpus), and their scores on tasks of
lm-evaluation-harness (--tasks). MODEL is a Lamina or transformers checkpoint, a run's folder, or a study's folder. For
a study, Lamina reports the mean and the standard deviation over the seeds.

OUTPUT/report.html shows the results. table.csv, table.md and table.tex hold the same table in three formats, with one
row per model. results.csv holds all numbers, and items/ holds the scores of every question.

--tasks takes any task, group or tag of the harness, and these sets:""",
    examples="""
  lamina eval runs/keel-64 --corpus my_text.txt
  lamina eval runs/keel-64 runs/pre-64 --tasks generated --output runs/scores
  lamina eval models/smollm2 --tasks peri_ln --limit 200 --data-dir eval-data --output runs/peri-200
  lamina eval models/smollm2 --tasks arc_easy,hellaswag@5 --output runs/smollm2
  lamina eval runs/compare --tasks peri_ln --data-dir eval-data --output runs/peri --resume=auto
  lamina eval --compare runs/scores-a runs/scores-b --output runs/a-and-b
  lamina eval --list
""",
    settings=settings,
    run=evaluate,
    returns=(
        "``models`` (paths of checkpoints, runs and studies) and ``tasks`` may also be lists. Returns "
        "the content of result.json."
    ),
    raises="an unknown task, or data or a checkpoint that Lamina can't read",
    resumes="evaluate only unfinished tasks",
    positional=("models...",),
    listing=listing,
    inputs=("models",),
    files=("tasks",),
)
