"""Compare the scores of models on the same items, with confidence intervals and significance tests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from lamina.core.frames import Frame
from lamina.core.intervals import ALPHA, holm, mean_and_error, t_interval
from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.evaluation.candidates import Candidate
from lamina.evaluation.scores import SHARES, Score
from lamina.evaluation.task_sets import Wanted, columns_of
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.names import RESULT
from lamina.jobs.seals import refuse_page

POWER = 0.8
"""The probability that the test detects a difference as large as ``Paired.smallest``."""
CHOICES = ("acc", "acc_norm")
"""The metrics of multiple-choice tasks. For these metrics, the accuracy of random guessing is known."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The difference between two models' scores on the same items. Scores are from 0 to 1, not in percent."""

    model: str
    against: str
    column: str
    metric: str
    items: int
    difference: float
    # the 95 % interval of the difference (Student's t, or exact for scores of 0 and 1 with equal differences)
    low: float
    high: float
    won: int | None  # the number of items that only ``model`` answers correctly, or None for scores between 0 and 1
    lost: int | None  # the number of items that only ``against`` answers correctly, or None for scores between 0 and 1
    p: float  # the two-sided p value. Scores of 0 and 1 get McNemar's exact test, and other scores get a paired t test
    smallest: float  # the smallest difference that the test detects with a probability of 80 %
    p_holm: float = math.nan  # the p value after Holm's correction over all columns of ``model``


def chance(items: Frame, metric: str) -> float | None:
    """Return the expected accuracy of random guessing, or None for a task without choices."""
    choices = items["log_likelihoods"].map(len)
    if metric not in CHOICES or not len(items) or choices.min() < 2:
        return None
    return float((1 / choices).mean())


def with_chance(scores: Sequence[Score], items: Frame) -> list[Score]:
    """Add the expected accuracy of random guessing to each score. For a group of tasks, average over the items."""
    scored = []
    for score in scores:
        task_items = items[items["task"] == score.task]
        scored.append(replace(score, chance=chance(task_items if len(task_items) else items, score.metric)))
    return scored


def values_of(items: Frame, metric: str, chosen: str) -> Frame | None:
    """Return each item's value of a metric from 0 to 1. Returns None for all other metrics."""
    rows = items[items["filter"] == chosen] if (items["filter"] == chosen).any() else items
    parts = rows["metrics"].map(lambda text: json.loads(text).get(metric))
    if metric not in SHARES or not len(rows) or not parts.map(lambda part: isinstance(part, int | float)).all():
        return None
    keys = pd.MultiIndex.from_frame(rows[["task", "doc_id"]])
    return pd.Series(parts.astype(float).to_numpy(), index=keys).sort_index()


def refuse_other_items(one: Frame, other: Frame, names: tuple[str, str], column: str) -> None:
    """Raise UserError if two tables have items with different numbers, targets or (if known) contents."""
    hashed = ["doc_hash"] if "doc_hash" in one and "doc_hash" in other else []
    shared = ["task", "filter", "doc_id", "target", *hashed]
    rows = [set(map(tuple, table[shared].astype(str).to_numpy())) for table in (one, other)]
    if rows[0] == rows[1]:
        return
    apart = len(rows[0] ^ rows[1])
    raise UserError(
        f"compare: {names[0]} and {names[1]} have different items of {column}: {apart} items are in only one of the "
        "two evaluations. Evaluate both models again, with the same data and --limit."
    )


def paired(first: Frame, other: Frame) -> Json:
    """Compare two models' scores on the same items, in the same order. Returns the fields of a ``Paired``."""
    from scipy.special import bdtr, ndtri, stdtr, stdtrit

    differences = (other - first).tolist()
    count, binary = len(differences), set(first) | set(other) <= {0.0, 1.0}
    mean, error = mean_and_error(differences) if count > 1 else (differences[0], math.nan)
    low, high = t_interval(differences) if error > 0 else (math.nan, math.nan)
    if binary and error == 0:  # exact, as no item disagrees with the others: (1 - share) ** count = ALPHA / 2
        share = 1 - (ALPHA / 2) ** (1 / count)
        low, high = max(-1.0, mean - share), min(1.0, mean + share)
    won, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    if binary:
        p = min(1.0, 2 * float(bdtr(min(won, lost), won + lost, 0.5)))
    elif count > 1 and error > 0:
        p = min(1.0, 2 * float(stdtr(count - 1, -abs(mean) / error)))
    else:
        p = 1.0 if mean == 0 else math.nan
    reach = float(stdtrit(count - 1, 1 - ALPHA / 2) + ndtri(POWER)) if count > 1 else math.nan
    smallest = reach * error
    if binary:  # at least 6 items must differ for significance: 2 * 0.5**6 < 0.05
        fewest = math.ceil(math.log2(2 / ALPHA))
        smallest = max(smallest, fewest / count) if smallest == smallest else math.nan
    smallest = smallest if smallest <= 1 else math.nan  # scores are from 0 to 1: no difference is large enough
    tested = {"p": p, "smallest": smallest, "won": won if binary else None, "lost": lost if binary else None}
    return {"items": count, "difference": mean, "low": low, "high": high, **tested}


def compared(
    columns: Sequence[Wanted],
    candidates: Sequence[Candidate],
    numbers: dict[tuple[str, Wanted], Score],
    items: dict[tuple[str, str], Frame],
) -> list[Paired]:
    """Compare each model with the first model in every column from 0 to 1. ``items`` maps (model, unit) to a table."""
    evaluated = [candidate for candidate in candidates if not candidate.left_out]
    rows: list[Paired] = []
    for other in evaluated[1:]:
        mine: list[Paired] = []
        for column in columns:
            first, name = evaluated[0].name, other.name
            score = numbers.get((first, column))
            tables = [items.get((model, column.unit)) for model in (first, name)]
            if score is None or tables[0] is None or tables[1] is None:
                continue
            refuse_other_items(tables[0], tables[1], (first, name), column.title)
            values = [values_of(table, score.metric, score.filter) for table in tables if table is not None]
            if values[0] is None or values[1] is None:
                continue
            about = {"model": name, "against": first, "column": column.title, "metric": score.metric}
            mine.append(Paired(**about, **paired(values[0], values[1])))
        adjusted = holm([row.p for row in mine])
        rows += [replace(row, p_holm=p) for row, p in zip(mine, adjusted, strict=True)]
    return rows


def to_frame(rows: Iterable[Paired]) -> pd.DataFrame:
    return pd.DataFrame([asdict(row) for row in rows], columns=pd.Index(Paired.__dataclass_fields__))


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The models, columns and scores of earlier evaluations."""

    candidates: list[Candidate]
    columns: list[Wanted]
    records: dict[tuple[str, str], Json]
    folders: dict[str, tuple[Path, str]]


def earlier(paths: Sequence[str]) -> Earlier:
    """Read finished evaluations. Raises UserError for a folder without a finished evaluation."""
    paths = list(dict.fromkeys(paths))
    if len(paths) < 2 and not (paths and len(_result(paths[0])["models"]) > 1):
        raise UserError("compare: you gave only one model. Give the folders of at least two evaluations.")
    evaluations = Earlier(candidates=[], columns=[], records={}, folders={})
    results = {path: _result(path) for path in paths}
    names = [model["name"] for result in results.values() for model in result["models"]]
    wanted: dict[str, Wanted] = {}
    for path, result in results.items():
        settings = result["settings"]
        tasks = [name for name in str(settings.get("tasks") or "").split(",") if name]
        wanted |= {f"{entry.unit} {entry.metric}": entry for entry in columns_of(tasks, settings.get("num_fewshot"))}
        for model in result["models"]:
            facts = {key: model[key] for key in ("path", "arm", "seed", "status")}
            name = model["name"]
            if names.count(name) > 1:
                name, facts["arm"] = f"{Path(path).name}/{name}", f"{Path(path).name}/{facts['arm']}"
            evaluations.candidates.append(Candidate(name=name, **facts))
            evaluations.folders[name] = Path(path), model["name"]
            records = (record for record in result["units"] if record["model"] == model["name"])
            evaluations.records.update({(name, record["unit"]): {**record, "model": name} for record in records})
    units = {unit for _, unit in evaluations.records}
    columns_here = [column for column in wanted.values() if column.unit in units]
    named = {column.unit for column in columns_here}
    for unit in sorted(units - named):  # a text's perplexity, and the members of a tag
        task, _, shots = unit.partition("@")
        perplexity = {"metric": "token_perplexity", "heading": "ppl"} if unit == "perplexity" else {}
        columns_here.append(Wanted(task=task, num_fewshot=int(shots) if shots else None, **perplexity))
    evaluations.columns.extend(columns_here)
    return evaluations


def _result(path: str) -> Json:
    folder = Path(path).expanduser()
    if kind_of(folder) != Kind.EVALUATION or not (folder / RESULT).is_file():
        raise UserError(f"compare: {path!r} holds no evaluation. Give folders that `lamina eval` wrote.")
    refuse_page(folder)
    result = read_json(folder / RESULT)
    if result.get("status") != "finished":
        raise UserError(
            f"compare: the evaluation {path!r} is {result.get('status')}. Run: lamina eval --output {path} --resume"
        )
    return result
