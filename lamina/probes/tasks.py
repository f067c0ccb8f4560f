"""A task of lm-evaluation-harness as a model's score."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.probes.engine.context import Context


class Task:
    """One task, read once. Raises UserError if lm-eval is not installed or has no such task or metric."""

    def __init__(self, name: str, *, include_path: str | None = None, metric: str = "acc", limit: int | None = None):
        try:
            import lm_eval
            from lm_eval.tasks import TaskManager
        except ImportError:
            raise UserError(f"task: {name!r} needs lm-evaluation-harness (allowed: pip install lm-eval)") from None
        if include_path is not None and not Path(include_path).is_dir():
            raise UserError(f"include_path: {include_path!r} is no folder (allowed: a folder of task YAML)")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise UserError(f"limit: {limit!r} (allowed: a number of documents, 1 or more)")
        self.name, self.metric, self.limit, self.higher_is_better = name, metric, limit, True
        self._evaluate: Any = lm_eval.simple_evaluate
        self._manager: Any = TaskManager(include_path=include_path)
        if name not in self._manager.all_tasks:
            hint = f" or in {include_path!r}" if include_path is not None else " (include_path: a folder of your own)"
            raise UserError(f"task: {name!r} is not among lm-eval's tasks{hint}")

    def measure(self, context: Context) -> tuple[float, float]:
        """The metric's value and standard error (NaN if the task has none) for the model in its present state."""
        from lm_eval.models.huggingface import HFLM

        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each model that it did not load itself
        if context.tokenizer is None:
            raise UserError(f"task: {self.name!r} is text, and the checkpoint has no tokenizer (allowed: --tokenizer)")
        harness_model: Any = HFLM
        model = harness_model(
            pretrained=context.model, tokenizer=context.tokenizer, batch_size=len(context.batches[0]["input_ids"])
        )
        output = self._evaluate(
            model=model,
            tasks=[self.name],
            task_manager=self._manager,
            limit=self.limit,
            bootstrap_iters=100,  # of metrics without an error in closed form
            log_samples=False,
        )
        results = output["results"][self.name]
        key = next((k for k in results if k.split(",")[0] == self.metric), None)
        if key is None:
            known = sorted({k.split(",")[0] for k, v in results.items() if isinstance(v, float) and "stderr" not in k})
            raise UserError(f"task_metric: {self.name!r} has no {self.metric!r} (allowed: {', '.join(known)})")
        self.higher_is_better = bool(output.get("higher_is_better", {}).get(self.name, {}).get(self.metric, True))
        error = results.get(f"{self.metric}_stderr,{key.partition(',')[2]}")
        return float(results[key]), float(error) if isinstance(error, int | float) else math.nan
