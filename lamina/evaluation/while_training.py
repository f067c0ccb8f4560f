"""The harness's tasks on a model while it trains: `lamina pretrain --eval-tasks`."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.errors import UserError
from lamina.evaluation.job import what_to_run
from lamina.evaluation.scores import number_of, scores_of
from lamina.evaluation.settings import EvalSettings
from lamina.evaluation.task_sets import Wanted
from lamina.harness.runner import Runner
from lamina.harness.tasks import Tasks


@dataclass(frozen=True, kw_only=True)
class TaskMeasure:
    """The tasks to score at each evaluation.

    Attributes:
        columns: the numbers, one record each.
        tasks: what they need.
        limit: items per task; None for all.
        batch_size: sequences per forward pass.
        seed: of the few-shot examples.
    """

    columns: tuple[Wanted, ...]
    tasks: Tasks
    limit: int | None
    batch_size: int
    seed: int

    @staticmethod
    def find(names: str, data_dir: str | None, limit: int, batch_size: int, seed: int) -> TaskMeasure:
        """The tasks, with their data read once. Raises UserError, about eval_tasks, where that fails."""
        try:
            settings = EvalSettings(tasks=names, data_dir=data_dir, limit=limit or None)
            columns, tasks = what_to_run(settings)
            assert tasks is not None
            for column in {one.task: one for one in columns}.values():
                tasks.build(column.task)
        except UserError as error:
            raise UserError(f"eval_tasks: {str(error).removeprefix('tasks: ')}") from error
        return TaskMeasure(columns=tuple(columns), tasks=tasks, limit=settings.limit, batch_size=batch_size, seed=seed)

    def scores(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        """The columns' numbers by ``TASK`` or ``TASK:METRIC``; shares from 0 to 1.

        The caller keeps the training undisturbed: the harness seeds the random generators.
        """
        runner = Runner(model=model, tokenizer=tokenizer, batch_size=self.batch_size, limit=self.limit, seed=self.seed)
        found: dict[str, float] = {}
        for unit in dict.fromkeys(column.unit for column in self.columns):
            columns = [column for column in self.columns if column.unit == unit]
            results, _ = runner.run(self.tasks.build(columns[0].task), columns[0].num_fewshot)
            scores = scores_of(results)
            for column in columns:
                number = number_of(column, scores)
                if number is not None:
                    found[unit if number.metric == "acc" else f"{unit}:{number.metric}"] = number.value
        return found
