"""Scores: a model's numbers on a task and on each of its items, as rows of tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import pandas as pd

from lamina.core.json_types import Json
from lamina.evaluation.task_sets import Wanted

PERPLEXITY = "perplexity"
"""The unit of a text's perplexity."""
# Which metric of a task is its main one: the first of these that it has.
_MAIN = ("acc", "exact_match", "pass@1", "pass_at_1", "token_perplexity", "word_perplexity", "perplexity")
SHARES = frozenset({"acc", "acc_norm", "acc_mutual_info", "exact_match", "pass@1", "pass_at_1", "f1", "mcc", "em"})
"""Metrics from 0 to 1, which tables print in percent and average."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of a model on a task, as results.csv has it.

    Attributes:
        task: the harness's name of the task or group.
        metric: of the task.
        filter: which of the harness's filters the answers went through; "none" for most tasks.
        value: the number.
        stderr: its standard error over the items; None where the harness has none.
        items: scored; of a perplexity, its documents.
        num_fewshot: examples before each question.
        higher_is_better: whether a larger value is better.
        split: of the data.
    """

    task: str
    metric: str
    value: float
    filter: str = "none"
    stderr: float | None = None
    items: int | None = None
    num_fewshot: int | None = None
    higher_is_better: bool | None = None
    split: str = ""


def scores_of(results: Json) -> list[Score]:
    """Read the numbers of each task and each group from the harness's result."""
    counted, shots = results.get("n-samples", {}), results.get("n-shot", {})
    better, configs = results.get("higher_is_better", {}), results.get("configs", {})
    scores = []
    for task, numbers in {**results.get("results", {}), **results.get("groups", {})}.items():
        config = configs.get(task, {})
        split = config.get("test_split") or config.get("validation_split") or ""
        for key, value in numbers.items():
            metric, comma, chain = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{chain}")
            scores.append(
                Score(
                    task=task,
                    metric=metric,
                    filter=chain,
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) and math.isfinite(error) else None,
                    items=(counted.get(task) or {}).get("effective"),
                    num_fewshot=shots.get(task),
                    higher_is_better=(better.get(task) or {}).get(metric),
                    split=str(split),
                )
            )
    return scores


def from_rows(rows: Sequence[Mapping[str, object]]) -> list[Score]:
    """Read scores that ``to_rows`` wrote, also after JSON."""
    known = {entry.name for entry in fields(Score)}
    return [
        Score(**{name: value for name, value in row.items() if name in known} | {"value": float(str(row["value"]))})  # type: ignore[arg-type]
        for row in rows
    ]


def to_rows(scores: Sequence[Score]) -> list[Json]:
    """Return scores as JSON. Infinite values and NaN become texts, since JSON files write null for them."""
    return [
        asdict(score) | {"value": score.value if math.isfinite(score.value) else str(score.value)} for score in scores
    ]


def number_of(wanted: Wanted, scores: Sequence[Score]) -> Score | None:
    """Return the number that a column prints; None if the unit has none.

    Of a group without a number of its own: the mean over its tasks.
    """
    metric = wanted.metric or main_metric(scores, wanted.task)
    own = [score for score in scores if score.task == wanted.task and score.metric == metric]
    if own:
        return own[0]
    members = {score.task: score for score in reversed(scores) if score.metric == metric}
    if not members:
        return None
    items = [score.items or 0 for score in members.values()]
    mean = statistics.fmean(score.value for score in members.values())
    return Score(task=wanted.task, metric=str(metric), value=mean, items=sum(items), higher_is_better=True)


def main_metric(scores: Sequence[Score], task: str) -> str | None:
    """The main metric of a task, or of a group's tasks."""
    own = [score.metric for score in scores if score.task == task] or [score.metric for score in scores]
    return next((metric for metric in _MAIN if metric in own), own[0] if own else None)


def item_table(samples: Mapping[str, Sequence[Json]]) -> pd.DataFrame:
    """One row per item.

    Columns: ``task``; ``filter`` (of the answers: an item has one row per filter); ``doc_id`` (the item's number in the
    data); ``target``; ``log_likelihoods`` (nats; of each choice, or of the one continuation or text) and ``greedy``
    (whether each is the likeliest continuation); ``answer`` (the text that the model wrote, for a task that generates);
    ``metrics`` (JSON: the item's part in each metric).
    """
    return pd.DataFrame(
        [_row(task, sample) for task, listed in samples.items() for sample in listed],
        columns=["task", "filter", "doc_id", "target", "log_likelihoods", "greedy", "answer", "metrics"],
    )


def _row(task: str, sample: Json) -> Json:
    answers = [part[0] if isinstance(part, list | tuple) and part else part for part in sample.get("resps", [])]
    scored = [part for part in answers if isinstance(part, list | tuple) and len(part) == 2]
    numbers = [float(part[0]) for part in scored]
    numbers += [float(part) for part in answers if isinstance(part, int | float)]  # a rolling log-likelihood
    written = [part for part in answers if isinstance(part, str)]
    return {
        "task": task,
        "filter": str(sample.get("filter", "none")),
        "doc_id": int(sample["doc_id"]),
        "target": str(sample.get("target")),
        "log_likelihoods": numbers,
        "greedy": [bool(part[1]) for part in scored],
        "answer": written[0] if written else None,
        "metrics": json.dumps({name: sample.get(name) for name in sample.get("metrics", [])}, default=str),
    }
