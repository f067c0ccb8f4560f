"""`lamina eval`: evaluate models on tasks and texts, and write the scores and tables into a folder."""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import torch
from accelerate.utils import find_executable_batch_size
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.core.progress import has_bars
from lamina.core.terminal import show_line
from lamina.core.values import comma_separated
from lamina.data.corpus import Corpus
from lamina.errors import UserError, one_line, renamed_setting, unknown
from lamina.evaluation import generated
from lamina.evaluation.candidates import Candidate, Expand, candidates_of, check_candidate, load_candidate, stamp
from lamina.evaluation.harness import WRITES, Runner
from lamina.evaluation.paired import Paired, compared, earlier, to_frame, with_chance
from lamina.evaluation.perplexity import Perplexity, documents_of, perplexity
from lamina.evaluation.scores import PERPLEXITY, Score, from_rows, item_table, number_of, scores_of, table, to_rows
from lamina.evaluation.settings import EvalSettings
from lamina.evaluation.task_files import Tasks
from lamina.evaluation.task_names import OWN_FILES
from lamina.evaluation.task_sets import GENERATED, SETS, Wanted, columns_of
from lamina.jobs.files import (
    disk_full,
    finite,
    full_disk,
    read_config,
    read_json,
    write_json,
    write_parquet,
    write_text,
)
from lamina.jobs.folder import Resume
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import CONFIG, RESULTS
from lamina.jobs.seals import altered, write_result
from lamina.jobs.status import Status
from lamina.modeling.backbones.loading import refuse_scores
from lamina.modeling.checkpoint import checked_device
from lamina.modeling.processes import ALONE, Processes, join_processes, launched, reported_once

logger = logging.getLogger(__name__)

MOST = 64  # sequences per forward pass in the first attempt, as in the harness
LONGEST_WINDOW = 2048  # in tokens, unless the user or the model sets a smaller window
_ABOUT = ("name", "path", "arm", "seed", "status", "left_out")  # a candidate's fields in result.json
PAIRED = "paired.csv"
RUNNING = "the evaluation is still running, or was killed (continue with --resume)"
POLICY = ResumePolicy(what="evaluation", free=EvalSettings.free() | {"batch_size"})  # the first may not have fit


def evaluate(
    settings: EvalSettings | Mapping[str, object],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
    expand: Expand = lambda path: None,
) -> Json:
    """Evaluate models, write the output folder, and return the content of result.json.

    Args:
        resume: whether to keep the scores in the output folder, and compute only the missing scores.
        overwrite: whether to replace the output folder's content.
        expand: a function that finds the runs in a study's folder. By default, each path is one checkpoint.

    Raises:
        UserError: a setting is invalid, a task is unknown, data or a checkpoint is unreadable, or the folder has files.
        OSError: the disk is full. Lamina keeps the finished scores.
        KeyboardInterrupt: the user pressed Ctrl-C. Lamina keeps the finished scores.
    """
    if not isinstance(settings, EvalSettings):
        lists = ("models", "tasks")
        settings = {name: comma_separated(name, value) if name in lists else value for name, value in settings.items()}
    job = reported_once(
        lambda: open_job(
            Kind.EVALUATION,
            EvalSettings,
            settings,
            resume=resume,
            overwrite=overwrite,
            policy=POLICY,
            # None if no evaluation has begun, as in the folder of a study's trial
            stored=lambda folder: read_config(folder) if (folder / CONFIG).is_file() else None,
        )
    )
    several = launched()[1] > 1
    with join_processes(job.settings.device or "auto", "ddp") if several else nullcontext(ALONE) as processes:
        evaluation = processes.first_per_host(partial(Evaluation, job.settings, expand, processes, bar=bar))
        evaluation.check()  # before Lamina changes the folder, because the data may be missing
        with ExitStack() as held:
            processes.by_first(lambda: held.enter_context(job).write_config(job.settings.to_dict()))
            return evaluation.run(job.folder)


def what_to_run(settings: EvalSettings) -> tuple[list[Wanted], Tasks | None]:
    """Return the table's columns, and the tasks (None if no task is wanted). Raises UserError for an unknown task."""
    columns: list[Wanted] = []
    if settings.corpus is not None:
        Corpus.parse(settings.corpus, settings.text_field)
        columns.append(Wanted(task=PERPLEXITY, metric="token_perplexity", heading="ppl"))
    if not settings.task_list():
        return columns, None
    wanted = columns_of(settings.task_list(), settings.num_fewshot)
    ours = generated.cached() if any(column.task in generated.NAMES for column in wanted) else None
    tasks = Tasks.find(settings.data_dir, generated=ours, run_code=settings.run_code)
    tasks.require([column.task for column in wanted], source=OWN_FILES, others=[*SETS, GENERATED])
    for column in wanted:
        members = tasks.tagged(column.task)
        columns += [replace(column, task=task, heading="") for task in members] if members else [column]
    return list(dict.fromkeys(columns)), tasks


def check_generation(options: Json, writes: bool) -> None:
    """Raise UserError for an unknown argument of ``generate``, or if no task generates text."""
    arguments = {*GenerationConfig().to_dict(), "max_gen_toks", "until"}
    for name in options:
        if name not in arguments:
            raise unknown("generation argument", name, arguments)
    if not writes:
        raise UserError(
            f"generation.{next(iter(options))}: this argument has no effect, because no task generates text"
        )


class Evaluation:
    """An evaluation of models on tasks. ``check`` reads the tasks' data, and ``run`` writes the output folder.

    ``expand`` finds the runs in a study's folder. Lamina splits each task's items and the text over ``processes``.
    """

    def __init__(self, settings: EvalSettings, expand: Expand, processes: Processes, *, bar: bool):
        settings.require()
        self.earlier = earlier(settings.model_list()) if settings.compare else None
        self.paired: list[Paired] = []
        self.processes, self.bar = processes, bar and processes.first
        self.settings, self.device = settings, checked_device(settings.device)
        if self.earlier is None:
            self.columns, self.tasks = what_to_run(settings)
            self.candidates = candidates_of(settings.model_list(), expand)
        else:
            self.columns, self.tasks, self.candidates = self.earlier.columns, None, self.earlier.candidates
        self.units = {column.unit: column for column in self.columns}
        self.records: dict[tuple[str, str], Json] = {}

    def check(self) -> None:
        """Read the models' configurations and the tasks' data. Raises UserError if a model or a task is unusable."""
        self.processes.first_per_host(self._check)

    def _check(self) -> None:
        if self.earlier is not None:
            self._compare(self.earlier.records)
            return
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        for candidate in self.candidates:
            if not candidate.left_out:
                config = check_candidate(candidate.path, self.settings)
                refuse_scores(config, f"models: {candidate.path!r}")
                if PERPLEXITY in self.units:
                    window_of(self.settings, config)
        if PERPLEXITY in self.units:
            next(iter(self._texts()), None)
        writes = False
        for column in self.units.values():
            if column.task != PERPLEXITY and self.tasks is not None:
                built = self.tasks.build(column.task)["tasks"].values()
                writes |= any(task.get_config("output_type") == WRITES for task in built)
        if self.settings.generation:
            check_generation(self.settings.generation, writes)

    def run(self, folder: Path) -> Json:
        """Evaluate the models, write the results, and return the content of result.json."""
        self.folder = folder
        self.records = self.processes.by_first(self._finished) if self.earlier is None else self.earlier.records
        self._write(Status.INTERRUPTED, RUNNING)
        try:
            for number, candidate in enumerate(self.candidates if self.earlier is None else (), start=1):
                todo = [unit for unit in self.units if (candidate.name, unit) not in self.records]
                if todo and not candidate.left_out:
                    self._evaluate(candidate, todo, f"{number} of {len(self.candidates)}")
        except KeyboardInterrupt:
            self._end(Status.INTERRUPTED, "stopped by Ctrl-C; finished scores are kept (continue with --resume)")
            raise
        except Exception as error:
            if disk_full(error):
                raise full_disk(folder) from error
            self._end(Status.FAILED, one_line(str(error) if isinstance(error, UserError) else error))
            raise
        try:
            self.processes.by_first(lambda: self._compare(self.records))
        except UserError as error:  # the data changed between two models; keep the scores
            logger.warning("%s", error)
        return self._write(Status.FINISHED, "")

    def _compare(self, records: Mapping[tuple[str, str], Json]) -> None:
        self.paired, tables = [], {}
        if sum(not candidate.left_out for candidate in self.candidates) < 2:
            return
        for model, unit in records:
            folder, name = (self.folder, model) if self.earlier is None else self.earlier.folders[model]
            path = folder / "items" / _file_name(name) / f"{_file_name(unit)}.parquet"
            if path.is_file():
                tables[model, unit] = pd.read_parquet(path)
        self.paired = compared(self.columns, self.candidates, self.scores(records), tables)
        if self.earlier is not None and not self.paired:
            raise UserError(
                "compare: the first evaluation shares no task with another one. Lamina compares no perplexities item "
                "by item. Evaluate the models on the same tasks, with the same --limit."
            )

    def _evaluate(self, candidate: Candidate, todo: list[str], position: str) -> None:
        load = partial(load_candidate, candidate.path, self.settings, self.device)
        model, tokenizer = self.processes.together(load)
        for unit in todo:
            state = self._state(candidate, unit)
            if self.bar:
                show_line(f"{candidate.name} ({position}): {unit}")
            began = time.monotonic()
            scores, notes = self._score(model, tokenizer, candidate, self.units[unit])
            record = {
                "model": candidate.name,
                "unit": unit,
                "state": state,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "scores": to_rows(scores),
                "notes": notes,
                "seconds": round(time.monotonic() - began, 3),
            }
            if self.processes.first:
                path = self._file("scores", candidate.name, unit, ".json")
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, record)
            self.records[candidate.name, unit] = record
            self._write(Status.INTERRUPTED, RUNNING)

    def _score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, candidate: Candidate, column: Wanted
    ) -> tuple[list[Score], list[str]]:
        if column.task == PERPLEXITY:
            return self._perplexity(model, tokenizer)
        assert self.tasks is not None
        runner = replace(runner_of(self.settings, model, tokenizer), processes=self.processes)
        results, notes = runner.run(self.tasks.build(column.task), column.num_fewshot, bar=self.bar and has_bars())
        if self.processes.first:
            path = self._file("items", candidate.name, column.unit, ".parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            items = item_table(results.get("samples", {}))
            write_parquet(path, items)
            return with_chance(scores_of(results), items), notes
        return scores_of(results), notes

    def _perplexity(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Score], list[str]]:
        settings = self.settings
        window, stride = window_of(settings, model.config)

        def measure(batch_size: int) -> Perplexity:
            off = not (self.bar and has_bars())
            with tqdm(desc="perplexity", unit=" tokens", disable=off, leave=False) as progress:
                reading = {"window": window, "stride": stride, "batch_size": batch_size, "share": share}
                return perplexity(
                    model, tokenizer, self._texts(), **reading, processes=self.processes, progress=progress.update
                )

        share = MOST if settings.batch_size == "auto" else None
        if settings.batch_size == "auto":
            measured = find_executable_batch_size(measure, 8 if model.device.type == "cpu" else MOST)()
        else:
            measured = measure(int(settings.batch_size))
        note = (
            f"{measured.tokens:,} tokens, {measured.words:,} words, {measured.bytes:,} bytes in "
            f"{measured.documents:,} documents; a window of {window} tokens, a stride of {stride} tokens"
        )
        scores = [
            Score(task=PERPLEXITY, metric=name, value=value, items=measured.documents, higher_is_better=False)
            for name, value in measured.numbers().items()
        ]
        return scores, [note, *measured.notes]

    def _texts(self) -> Iterable[str]:
        return documents_of(str(self.settings.corpus), self.settings.text_field, self.settings.limit)

    def _state(self, candidate: Candidate, unit: str) -> list[str]:
        """Return a hash of the model's files, and a hash of the files that hold the text or the tasks' data."""
        if unit == PERPLEXITY:
            corpus = Corpus.parse(str(self.settings.corpus), self.settings.text_field)
            return [candidate.state(), stamp(corpus.changed_since(0.0))]
        folder = self.settings.data_dir
        return [candidate.state(), stamp([] if folder is None else Path(folder).rglob("*"))]

    def _file(self, kind: str, model: str, unit: str, suffix: str) -> Path:
        return self.folder / kind / _file_name(model) / f"{_file_name(unit)}{suffix}"

    def _finished(self) -> dict[tuple[str, str], Json]:
        """Return the scores in the output folder that are still valid for these models and tasks."""
        finished, faults = {}, altered(self.folder)
        for candidate in self.candidates:
            for unit in self.units:
                path = self._file("scores", candidate.name, unit, ".json")
                items = self._file("items", candidate.name, unit, ".parquet")
                if not path.is_file():
                    continue
                try:
                    for file in (path, items):
                        if fault := faults.get(file.relative_to(self.folder).as_posix()):
                            raise ValueError(f"{file.name}: {fault}")
                    record = read_json(path)
                    if unit != PERPLEXITY:
                        path = items
                        pyarrow.parquet.read_metadata(items)
                    if record["state"] == self._state(candidate, unit) and from_rows(record["scores"]):
                        finished[candidate.name, unit] = record
                except (OSError, ValueError, KeyError, TypeError) as error:
                    logger.warning(
                        "%s is missing or damaged (%s), so Lamina computes these scores again", path, one_line(error)
                    )
        return finished

    def scores(self, records: Mapping[tuple[str, str], Json] | None = None) -> dict[tuple[str, Wanted], Score]:
        numbers = {}
        for (model, unit), record in (self.records if records is None else records).items():
            for column in (column for column in self.columns if column.unit == unit):
                number = number_of(column, from_rows(record["scores"]))
                if number is not None:
                    numbers[model, column] = number
        return numbers

    def _write(self, status: Status, reason: str) -> Json:
        return self.processes.by_first(partial(self._written, status, reason))

    def _end(self, status: Status, reason: str) -> None:
        """Write how the evaluation ended, without waiting for other processes, which may have failed."""
        if self.processes.first:
            self._written(status, reason)

    def _written(self, status: Status, reason: str) -> Json:
        keys = [(candidate.name, unit) for candidate in self.candidates for unit in self.units]
        finished = [self.records[key] for key in keys if key in self.records]
        printed = table(self.columns, self.candidates, self.scores())
        result = {
            "status": str(status),
            "reason": reason,
            "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": self.settings.command(),
            "settings": self.settings.to_dict(),
            "models": [
                {
                    **{name: getattr(candidate, name) for name in _ABOUT},
                    "parameters": next((r["parameters"] for r in finished if r["model"] == candidate.name), None),
                }
                for candidate in self.candidates
            ],
            "units": [record for _, record in sorted(self.records.items())],
            "seconds": round(sum(record["seconds"] for record in self.records.values()), 2),
            "table": printed.to_json(),
            "paired": finite([asdict(row) for row in self.paired]),
        }
        if self.paired:
            write_text(self.folder / PAIRED, to_frame(self.paired).to_csv(index=False))
        write_text(self.folder / RESULTS, rows(finished, self.candidates).to_csv(index=False))
        for name, text in (("csv", printed.csv()), ("md", printed.markdown()), ("tex", printed.latex())):
            write_text(self.folder / f"table.{name}", text)
        write_result(self.folder, result)  # write this file last, because a page reads it first
        return result


def rows(records: Iterable[Json], candidates: Sequence[Candidate]) -> pd.DataFrame:
    """Return the table of results.csv. The table has one row for each model, task, metric and filter."""
    models = {candidate.name: candidate for candidate in candidates}
    listed = [
        {"model": record["model"], "arm": models[record["model"]].arm, "seed": models[record["model"]].seed, **score}
        for record in records
        for score in record["scores"]
    ]
    return pd.DataFrame(listed, columns=pd.Index(("model", "arm", "seed", *Score.__dataclass_fields__)))


def window_of(settings: EvalSettings, config: PreTrainedConfig) -> tuple[int, int]:
    """Return the window and the stride in tokens. Raises UserError for a window longer than the model's context."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    window = settings.window or min(longest or LONGEST_WINDOW, LONGEST_WINDOW)
    if longest is not None and window > longest:
        raise UserError(f"window: {window} is longer than the model's context. Choose at most {longest}.")
    stride = settings.stride or max(1, window // 2)
    if stride > window:
        raise UserError(f"stride: {stride} skips tokens. Choose at most {window}, the window's length.")
    return window, stride


def _file_name(name: str) -> str:
    """Return a unique file name of letters, digits and ``@._-``. If Lamina replaces characters, a hash follows."""
    plain = re.sub(r"[^A-Za-z0-9@._-]+", "-", name).strip("-.")[-80:]
    return plain if plain == name else f"{plain or 'model'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def runner_of(settings: EvalSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Runner:
    names = ("batch_size", "limit", "seed", "chat_template", "system", "generation", "run_code")
    return Runner(model=model, tokenizer=tokenizer, **{name: getattr(settings, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class TaskMeasure:
    """The tasks that `lamina pretrain --eval-tasks` scores at each evaluation."""

    settings: EvalSettings
    columns: tuple[Wanted, ...]
    tasks: Tasks

    @staticmethod
    def find(
        names: str, data_dir: str | None, limit: int, batch_size: int, seed: int, *, run_code: bool = False
    ) -> TaskMeasure:
        """Find the tasks and read their data. A UserError's message names the setting eval_tasks."""
        reading = {"limit": limit or None, "batch_size": batch_size, "seed": seed, "run_code": run_code}
        with renamed_setting("tasks", "eval_tasks"):
            settings = EvalSettings(tasks=names, data_dir=data_dir, **reading)
            columns, tasks = what_to_run(settings)
            assert tasks is not None
            for task in dict.fromkeys(column.task for column in columns):
                tasks.build(task)
        return TaskMeasure(settings=settings, columns=tuple(columns), tasks=tasks)

    def scores(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        """Return the scores by ``TASK`` or ``TASK:METRIC``, with accuracies from 0 to 1. The harness changes the states
        of the random generators.
        """
        runner, results = runner_of(self.settings, model, tokenizer), {}
        numbers: dict[str, float] = {}
        for column in self.columns:
            if column.unit not in results:
                built = self.tasks.build(column.task)
                results[column.unit] = scores_of(runner.run(built, column.num_fewshot)[0])
            number = number_of(column, results[column.unit])
            if number is not None:
                numbers[column.unit if number.metric == "acc" else f"{column.unit}:{number.metric}"] = number.value
        return numbers
