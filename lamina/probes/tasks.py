"""A task of lm-evaluation-harness as a model's score."""

from __future__ import annotations

import math
from pathlib import Path

from transformers import PreTrainedModel

from lamina.errors import UserError
from lamina.evaluation.harness import Runner
from lamina.evaluation.task_files import Tasks
from lamina.probes.engine.context import Context


class Task:
    """One task. Raises UserError if lm-eval is not installed or has no such task, or if the task would run code."""

    def __init__(self, name: str, *, include_path: str | None = None, metric: str = "acc", limit: int | None = None):
        if include_path is not None and not Path(include_path).is_dir():
            raise UserError(f"include_path: {include_path!r} is no folder (allowed: a folder of task YAML)")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise UserError(f"limit: {limit!r} (allowed: a number of documents, 1 or more)")
        self.name, self.metric, self.limit, self.higher_is_better = name, metric, limit, True
        try:
            self._tasks = Tasks.find(None, *([Path(include_path)] if include_path is not None else []))
            self._tasks.require([name], source="*.yaml in include_path")
            self._tasks.build(name)
        except UserError as error:
            raise UserError(f"task: {str(error).removeprefix('tasks: ')}") from None

    def measure(self, context: Context) -> tuple[float, float]:
        """The metric's value and standard error (NaN if the task has none) for the model in its present state."""
        if context.tokenizer is None:
            raise UserError(f"task: {self.name!r} is text, and the checkpoint has no tokenizer (allowed: --tokenizer)")
        assert isinstance(context.model, PreTrainedModel)
        rows = len(context.batches[0]["input_ids"])
        runner = Runner(model=context.model, tokenizer=context.tokenizer, batch_size=rows, limit=self.limit)
        output, _ = runner.run(self._tasks.build(self.name), None)
        results = output["results"][self.name]
        key = next((k for k in results if k.split(",")[0] == self.metric), None)
        if key is None:
            known = sorted({k.split(",")[0] for k, v in results.items() if isinstance(v, float) and "stderr" not in k})
            raise UserError(f"task_metric: {self.name!r} has no {self.metric!r} (allowed: {', '.join(known)})")
        self.higher_is_better = bool(output.get("higher_is_better", {}).get(self.name, {}).get(self.metric, True))
        error = results.get(f"{self.metric}_stderr,{key.partition(',')[2]}")
        return float(results[key]), float(error) if isinstance(error, int | float) else math.nan
