"""The models on the tasks, one after the other; each score is written as soon as it is known."""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.core.progress import has_bars
from lamina.errors import UserError, one_line
from lamina.evaluation.candidates import Candidate, check_candidate, load_candidate
from lamina.evaluation.items import item_table
from lamina.evaluation.perplexity import documents_of, perplexity
from lamina.evaluation.scores import PERPLEXITY, Score, from_rows, number_of, scores_of, to_rows
from lamina.evaluation.settings import EvalSettings
from lamina.evaluation.stamps import stamp_of_corpus, stamp_of_folder
from lamina.evaluation.tables import ScoreTable, table
from lamina.evaluation.task_sets import Wanted
from lamina.harness.runner import Runner
from lamina.harness.tasks import Tasks
from lamina.jobs import digests
from lamina.jobs.files import disk_full, write_json, write_text, writing
from lamina.jobs.status import Status
from lamina.modeling.backbones.configurations import refuse_scores

logger = logging.getLogger(__name__)

LONGEST_WINDOW = 2048  # tokens, where neither the user nor the model says less


class Evaluating:
    """What is to be evaluated: ``check`` reads the tasks' data, ``run`` evaluates and writes.

    Args:
        settings: of the job.
        candidates: the models.
        columns: the numbers that the table prints.
        tasks: what the columns need; None for a perplexity alone.
        device: where the models run.
        bar: whether to show progress.
    """

    def __init__(
        self,
        settings: EvalSettings,
        candidates: Sequence[Candidate],
        columns: Sequence[Wanted],
        tasks: Tasks | None,
        *,
        device: str,
        bar: bool,
    ):
        self.settings, self.candidates, self.columns, self.tasks = settings, candidates, columns, tasks
        self.device, self.bar = device, bar
        self.units = {column.unit: column for column in columns}
        self.records: dict[tuple[str, str], Json] = {}
        self.numbers: dict[str, int] = {}
        self._began = time.monotonic()

    def check(self) -> None:
        """Look at every model and read every task's data. Raises UserError, before the folder is touched."""
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
        for column in self.units.values():
            if column.task != PERPLEXITY and self.tasks is not None:
                self.tasks.build(column.task)

    def run(self, folder: Path) -> Json:
        """Evaluate, write, and return the content of result.json; errors as in ``evaluate``."""
        self.folder = folder
        self._read_finished()
        self._write(Status.INTERRUPTED, "it is still running, or was killed (--resume continues)")
        try:
            for number, candidate in enumerate(self.candidates, start=1):
                if candidate.left_out:
                    continue
                todo = [unit for unit in self.units if (candidate.name, unit) not in self.records]
                if todo:
                    self._evaluate(candidate, todo, f"{number} of {len(self.candidates)}")
        except KeyboardInterrupt:
            self._write(Status.INTERRUPTED, "stopped by Ctrl-C; finished scores are kept (--resume continues)")
            raise
        except Exception as error:
            if disk_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            self._write(Status.FAILED, one_line(str(error) if isinstance(error, UserError) else error))
            raise
        return self._write(Status.FINISHED, "")

    def _evaluate(self, candidate: Candidate, todo: list[str], position: str) -> None:
        model, tokenizer = load_candidate(candidate.path, self.settings, self.device)
        for unit in todo:
            state = self._state(candidate, unit)
            if self.bar:
                tqdm.write(f"{candidate.name} ({position}): {unit}", file=sys.stderr)
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
            path = self._file("scores", candidate.name, unit, ".json")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
            self.records[candidate.name, unit] = record
            self._write(Status.INTERRUPTED, "it is still running, or was killed (--resume continues)")

    def _score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, candidate: Candidate, column: Wanted
    ) -> tuple[list[Score], list[str]]:
        if column.task == PERPLEXITY:
            return self._perplexity(model, tokenizer)
        assert self.tasks is not None
        runner = Runner(
            model=model,
            tokenizer=tokenizer,
            batch_size=self.settings.batch_size,
            limit=self.settings.limit,
            seed=self.settings.seed,
            chat_template=self.settings.chat_template,
            run_code=self.settings.run_code,
        )
        results, notes = runner.run(self.tasks.build(column.task), column.num_fewshot, bar=self.bar)
        path = self._file("items", candidate.name, column.unit, ".parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as temporary:
            item_table(results.get("samples", {})).to_parquet(temporary.absolute(), index=False)
        return scores_of(results), notes

    def _perplexity(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Score], list[str]]:
        settings = self.settings
        window, stride = window_of(settings, model.config)
        texts = self._texts()
        with tqdm(desc="perplexity", unit=" tokens", disable=not (self.bar and has_bars()), leave=False) as progress:
            found = perplexity(
                model, tokenizer, texts, window=window, stride=stride, batch_size=settings.batch_size, progress=progress
            )
        note = (
            f"{found.tokens:,} tokens, {found.words:,} words, {found.bytes:,} bytes in {found.documents:,} documents; "
            f"a window of {window} tokens, moved by {stride}"
        )
        scores = [
            Score(task=PERPLEXITY, metric=name, value=value, items=found.documents, higher_is_better=False)
            for name, value in found.numbers().items()
        ]
        return scores, [note]

    def _texts(self) -> Iterable[str]:
        return documents_of(str(self.settings.corpus), self.settings.text_field, self.settings.limit)

    def _state(self, candidate: Candidate, unit: str) -> object:
        """What a score rests on: the weights, and the files of the text or of the tasks' data."""
        if unit == PERPLEXITY:
            return [candidate.state(), stamp_of_corpus(str(self.settings.corpus), self.settings.text_field)]
        return [candidate.state(), stamp_of_folder(self.settings.data_dir)]

    def _file(self, kind: str, model: str, unit: str, suffix: str) -> Path:
        return self.folder / kind / f"{self.numbers[model]:03d}-{slug(model)}" / f"{slug(unit)}{suffix}"

    def _read_finished(self) -> None:
        """The scores that the folder holds of these models as they are now, on these tasks; and every model's number.

        A model keeps the number that its scores have, wherever it stands among the models now: a score that is
        computed again then takes the place of the old one.
        """
        held = {}
        for path in digests.intact(self.folder, "scores/*/*.json"):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                self.numbers[record["model"]] = int(path.parent.name.partition("-")[0])
                held[record["model"], record["unit"]] = record
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s: %s: it is computed again", path, one_line(error))
        whole = set(digests.intact(self.folder, "items/*/*.parquet"))
        taken = set(self.numbers.values())
        for place, candidate in enumerate(self.candidates):
            if candidate.name not in self.numbers:
                self.numbers[candidate.name] = next(n for n in itertools.count(place) if n not in taken)
                taken.add(self.numbers[candidate.name])
            for unit in self.units:
                record = held.get((candidate.name, unit))
                if record is None or record.get("state") != self._state(candidate, unit):
                    continue
                path = self._file("items", candidate.name, unit, ".parquet")
                if unit != PERPLEXITY and path not in whole:
                    logger.warning("%s is missing or damaged: it is computed again", path)
                else:
                    self.records[candidate.name, unit] = record

    def scores(self) -> dict[tuple[str, Wanted], Score]:
        """The columns' numbers so far, by model and column."""
        found = {}
        for (model, unit), record in self.records.items():
            for column in (column for column in self.columns if column.unit == unit):
                number = number_of(column, from_rows(record["scores"]))
                if number is not None:
                    found[model, column] = number
        return found

    def _write(self, status: Status, reason: str) -> Json:
        result = {
            "status": str(status),
            "reason": reason,
            "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": self.settings.command(),
            "settings": self.settings.to_dict(),
            "models": [self._about(candidate) for candidate in self.candidates],
            "units": [record for _, record in sorted(self.records.items())],
            "seconds": round(sum(record["seconds"] for record in self.records.values()), 2),
        }
        keys = [(candidate.name, unit) for candidate in self.candidates for unit in self.units]
        known = [self.records[key] for key in keys if key in self.records]
        printed = table(self.columns, self.candidates, self.scores())
        result["table"] = as_json(printed)
        write_text(self.folder / "results.csv", rows(known, self.candidates).to_csv(index=False))
        for name, text in (("csv", printed.csv()), ("md", printed.markdown()), ("tex", printed.latex())):
            write_text(self.folder / f"table.{name}", text)
        write_json(self.folder / "result.json", result)  # the last: a page reads it first
        return result

    def _about(self, candidate: Candidate) -> Json:
        known = [record for (name, _), record in self.records.items() if name == candidate.name]
        return {
            "name": candidate.name,
            "path": candidate.path,
            "arm": candidate.arm,
            "seed": candidate.seed,
            "status": candidate.status,
            "left_out": candidate.left_out,
            "parameters": known[0]["parameters"] if known else None,
        }


def as_json(printed: ScoreTable) -> Json:
    """The table for the page."""
    return {
        "headings": list(printed.headings),
        "best": list(printed.best),
        "shares": list(printed.shares),
        "lines": [
            {
                "arm": line.arm,
                "runs": line.runs,
                "left_out": line.left_out,
                "mean": [cell.mean for cell in line.cells],
                "std": [cell.std for cell in line.cells],
            }
            for line in printed.lines
        ],
    }


def rows(records: Iterable[Json], candidates: Sequence[Candidate]) -> pd.DataFrame:
    """results.csv: one row per model, task, metric and filter."""
    known = {one.name: one for one in candidates}
    table = [
        {"model": record["model"], "arm": known[record["model"]].arm, "seed": known[record["model"]].seed, **score}
        for record in records
        for score in record["scores"]
    ]
    names = ("model", "arm", "seed", *Score.__dataclass_fields__)
    return pd.DataFrame(table, columns=pd.Index(names))


def window_of(settings: EvalSettings, config: PreTrainedConfig) -> tuple[int, int]:
    """The window and the stride, tokens. Raises UserError for a window beyond the model's context."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    window = settings.window or min(longest or LONGEST_WINDOW, LONGEST_WINDOW)
    if longest is not None and window > longest:
        raise UserError(f"window: {window} is longer than the model's context (allowed: at most {longest})")
    stride = settings.stride or max(1, window // 2)
    if stride > window:
        raise UserError(f"stride: {stride} skips tokens (allowed: at most the window, {window})")
    return window, stride


def slug(name: str) -> str:
    """A name as a file's: letters, digits and a few marks, at most 80 characters."""
    return re.sub(r"[^A-Za-z0-9@._-]+", "-", name).strip("-.")[-80:] or "model"
