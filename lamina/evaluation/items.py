"""What a model did on each item of a task, for comparisons item by item."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pandas as pd

from lamina.core.json_types import Json


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
