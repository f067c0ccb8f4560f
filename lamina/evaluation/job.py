"""`lamina eval`: models and tasks in, a folder with scores and tables out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.values import comma_separated
from lamina.data import Corpus
from lamina.evaluation.candidates import Candidate, Expand, candidates_of
from lamina.evaluation.evaluating import Evaluating
from lamina.evaluation.generated import writing as generated
from lamina.evaluation.generated.tasks import NAMES
from lamina.evaluation.scores import PERPLEXITY
from lamina.evaluation.settings import EvalSettings
from lamina.evaluation.task_sets import GENERATED, SETS, Wanted, columns_of
from lamina.harness.tasks import Tasks
from lamina.jobs.files import read_written_yaml
from lamina.jobs.folder import Resume
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.resume import ResumePolicy
from lamina.modeling.checkpoint import checked_device

POLICY = ResumePolicy(
    what="evaluation",
    # what is evaluated, where, and how fast; not what a number means
    free=frozenset(("models", "tasks", "output", "threads", "device", "batch_size", "run_code")),
)


def one_model(path: str) -> list[Candidate] | None:
    """No folder of several runs: every path is a checkpoint of its own."""
    del path
    return None


def evaluate(
    settings: EvalSettings | Mapping[str, object],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
    expand: Expand = one_model,
) -> Json:
    """Evaluate models and write the folder ``settings.output``; returns the content of result.json.

    ``settings`` are a whole record, or the user's values by name. Each model's scores on each task are written as soon
    as they are known; with ``resume``, those are not computed again. ``expand`` finds the runs in a study's folder.

    Raises:
        UserError: for invalid settings, an unknown task, data or a checkpoint that can't be read, an output folder in
            use.
        OSError: the disk is full; finished scores are kept.
        KeyboardInterrupt: after result.json says `interrupted`; finished scores are kept.
    """
    given = settings if isinstance(settings, EvalSettings) else _normalized(settings)
    job = open_job(
        Kind.EVALUATION, EvalSettings, given, resume=resume, overwrite=overwrite, policy=POLICY, stored=_stored
    )
    complete = job.settings
    complete.require()
    columns, tasks = what_to_run(complete)
    candidates = candidates_of(complete.model_list(), expand)
    evaluating = Evaluating(complete, candidates, columns, tasks, device=checked_device(complete.device), bar=bar)
    evaluating.check()  # before the folder is touched: the data may not be there
    with job:
        job.write_yaml("config.yaml", complete.to_dict())
        return evaluating.run(job.folder)


def what_to_run(settings: EvalSettings) -> tuple[list[Wanted], Tasks | None]:
    """The columns, and the tasks that they need (None for a perplexity alone).

    Raises UserError for an unknown task, or a corpus that does not exist.
    """
    names = settings.task_list()
    columns: list[Wanted] = []
    if settings.corpus is not None:
        Corpus.parse(settings.corpus, settings.text_field)
        columns.append(Wanted(task=PERPLEXITY, metric="token_perplexity", heading="ppl"))
    if not names:
        return columns, None
    wanted = columns_of(names, settings.num_fewshot)
    made = generated.cached() if any(one.task in NAMES for one in wanted) else None
    tasks = Tasks.find(settings.data_dir, *([made] if made is not None else []), run_code=settings.run_code)
    place = "DIR/tasks/*.yaml in --data-dir"
    tasks.files.require([one.task for one in wanted], place=place, others=[*SETS, GENERATED])
    for one in wanted:
        members = tasks.files.tags.get(one.task) if one.task not in tasks.files.files else None
        columns += [one] if members is None else [_member(one, task) for task in sorted(members)]
    return list(dict.fromkeys(columns)), tasks


def _member(tag: Wanted, task: str) -> Wanted:
    return Wanted(task=task, num_fewshot=tag.num_fewshot, metric=tag.metric)


def _normalized(settings: Mapping[str, object]) -> Json:
    """The user's values, with lists as the command line has them."""
    lists = ("models", "tasks")
    return {name: comma_separated(name, value) if name in lists else value for name, value in settings.items()}


def _stored(folder: Path) -> Json | None:
    """The settings in a folder; None where no evaluation has begun, as in the folder of a study's trial."""
    path = folder / "config.yaml"
    return read_written_yaml(path) if path.is_file() else None
