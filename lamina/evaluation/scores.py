"""Scores of models on tasks and single items, and tables of the scores."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain

import pandas as pd

from lamina.core.json_types import Json
from lamina.evaluation.candidates import Candidate
from lamina.evaluation.task_sets import Wanted

PERPLEXITY = "perplexity"
"""The value of ``Wanted.task`` for the perplexity of a text."""
# A task's main metric is the first of these metrics that the task has.
_MAIN = ("acc", "exact_match", "pass@1", "pass_at_1", "token_perplexity", "word_perplexity", "perplexity")
SHARES = frozenset({"acc", "acc_norm", "acc_mutual_info", "exact_match", "pass@1", "pass_at_1", "f1", "mcc", "em"})
"""Metrics from 0 to 1, which the tables print and average in percent."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's score on a task. A score is a row of results.csv."""

    task: str  # the name of the task or group in the harness
    metric: str
    value: float
    filter: str = "none"  # the harness's filter for the answers, "none" for most tasks
    stderr: float | None = None  # the standard error over the items, or None if the harness gives none
    items: int | None = None  # the number of scored items, or of documents for a perplexity
    num_fewshot: int | None = None  # the number of examples before each question
    higher_is_better: bool | None = None
    split: str = ""
    chance: float | None = None  # the expected score of random guessing, or None for a task without choices


def scores_of(results: Json) -> list[Score]:
    """Return the score of each task and group in the harness's results."""
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
    """Convert the rows of ``to_rows`` back to scores."""
    names = {entry.name for entry in fields(Score)}
    return [
        Score(**{name: value for name, value in row.items() if name in names} | {"value": float(str(row["value"]))})  # type: ignore[arg-type]
        for row in rows
    ]


def to_rows(scores: Sequence[Score]) -> list[Json]:
    """Convert scores to JSON. NaN and infinite values become texts."""
    return [
        asdict(score) | {"value": score.value if math.isfinite(score.value) else str(score.value)} for score in scores
    ]


def number_of(wanted: Wanted, scores: Sequence[Score]) -> Score | None:
    """Return the score for a column, or None. For a group without a score, return the mean over the group's tasks."""
    names = [each.metric for each in scores if each.task == wanted.task] or [each.metric for each in scores]
    metric = wanted.metric or next((name for name in _MAIN if name in names), names[0] if names else None)
    matching = [score for score in scores if score.task == wanted.task and score.metric == metric]
    if matching:
        return matching[0]
    members = {score.task: score for score in reversed(scores) if score.metric == metric}
    if not members:
        return None
    items = [score.items or 0 for score in members.values()]
    mean = statistics.fmean(score.value for score in members.values())
    chances = [score.chance for score in members.values() if score.chance is not None]
    guessed = statistics.fmean(chances) if len(chances) == len(members) else None
    own_items = sum(items)
    return Score(
        task=wanted.task, metric=str(metric), value=mean, items=own_items, higher_is_better=True, chance=guessed
    )


def is_of(task: str, name: str) -> bool:
    """Return whether a score's name, such as ``TASK`` or ``TASK:METRIC``, belongs to a task."""
    return name == task or name.startswith(f"{task}:")


def lower_is_better(name: str) -> bool:
    """Return whether lower is better for a score with the name ``TASK:METRIC``."""
    return name.partition(":")[2].endswith(("perplexity", "bits_per_byte", "loss"))


def item_table(samples: Mapping[str, Sequence[Json]]) -> pd.DataFrame:
    """Return a table with one row for each item and each filter of the harness.

    - ``doc_id``: the item's number in the data
    - ``doc_hash``: a hash of the item's content
    - ``log_likelihoods``: the log-likelihood in nats of each choice or of the target
    - ``greedy``: whether each choice or target is the likeliest continuation
    - ``answer``: the text that the model generated
    - ``metrics``: the item's value of each metric, as JSON
    """
    return pd.DataFrame(
        [_row(task, sample) for task, listed in samples.items() for sample in listed],
        columns=["task", "filter", "doc_id", "doc_hash", "target", "log_likelihoods", "greedy", "answer", "metrics"],
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
        "doc_hash": str(sample.get("doc_hash", "")),
        "target": str(sample.get("target")),
        "log_likelihoods": numbers,
        "greedy": [bool(part[1]) for part in scored],
        "answer": written[0] if written else None,
        "metrics": json.dumps({name: sample.get(name) for name in sample.get("metrics", [])}, default=str),
    }


AVERAGE = "Avg."
FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """A row of a table of scores."""

    arm: str
    # each column's mean over the runs, or NaN without a score. Metrics from 0 to 1 are in percent
    means: tuple[float, ...]
    stds: tuple[float, ...]  # each column's sample standard deviation over the runs, or NaN for fewer than two runs
    runs: int  # the number of evaluated runs
    left_out: Mapping[str, int]  # the number of runs that Lamina did not evaluate, by reason: ``{"diverged": 2}``

    @property
    def label(self) -> str:
        """Return the row's name with the number of runs that have no score: ``keel (2 of 5 runs diverged)``."""
        total = self.runs + sum(self.left_out.values())
        reasons = ", ".join(f"{count} of {total} runs {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{self.arm} ({reasons})" if reasons else self.arm

    def texts(self, plus_minus: str = "±", dash: str = "–") -> list[str]:
        """Return the scores as texts such as ``41.34 ± 0.52``, with a dash for a missing score."""
        if not self.runs:
            return [FAILED, *[dash] * (len(self.means) - 1)]
        stds = [f" {plus_minus} {std:.2f}" if math.isfinite(std) else "" for std in self.stds]
        return [f"{mean:.2f}{std}" if math.isfinite(mean) else dash for mean, std in zip(self.means, stds, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """A table of scores. If several columns are in percent, the last column is the average of these columns."""

    headings: tuple[str, ...]
    lines: tuple[ScoreLine, ...]
    best: tuple[tuple[int, ...], ...]  # for each column, the indices of the rows with the best printed number
    shares: tuple[bool, ...]  # for each column, whether the scores are in percent
    # for each column, the expected score of random guessing in percent, or NaN for a task without choices
    chance: tuple[float, ...]

    def to_json(self) -> Json:
        lines = [
            {"arm": line.arm, "runs": line.runs, "left_out": line.left_out, "mean": [*line.means], "std": [*line.stds]}
            for line in self.lines
        ]
        more = {"best": [*self.best], "shares": [*self.shares], "chance": [*self.chance]}
        return {"headings": [*self.headings], **more, "lines": lines}

    def csv(self) -> str:
        """Return the table as CSV, with the means and the standard deviations in separate columns."""
        head = ["model", "runs", "left_out", *(f"{heading}{end}" for heading in self.headings for end in ("", " std"))]
        rows = [
            [line.arm, line.runs, sum(line.left_out.values()), *chain(*zip(line.means, line.stds, strict=True))]
            for line in self.lines
        ]
        return pd.DataFrame(rows, columns=pd.Index(head)).to_csv(index=False, float_format="%.6g")

    def markdown(self) -> str:
        rows = [["model", *self.headings], ["---", *["---:"] * len(self.headings)]]
        for line in self.lines:
            label = "".join(f"\\{c}" if c in "|\\`*_<>[]" else c for c in " ".join(line.label.split()))
            rows.append([label, *line.texts()])
        if any(map(math.isfinite, self.chance)):
            rows.append(["chance", *(f"{level:.2f}" if math.isfinite(level) else "–" for level in self.chance)])
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def latex(self) -> str:
        """Return the table as LaTeX with the rules of booktabs. The best score of each column is bold."""
        body = []
        for number, line in enumerate(self.lines):
            texts = [
                rf"\textbf{{{text}}}" if number in self.best[at] and len(self.lines) > 1 else text
                for at, text in enumerate(line.texts(r"$\pm$", "--"))
            ]
            body.append(" & ".join([_latex(line.label), *texts]) + r" \\")
        head = " & ".join(["Model", *map(_latex, self.headings)]) + r" \\"
        lines = [rf"\begin{{tabular}}{{l{'r' * len(self.headings)}}}", r"\toprule", head, r"\midrule", *body]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def table(
    columns: Sequence[Wanted], candidates: Sequence[Candidate], numbers: Mapping[tuple[str, Wanted], Score]
) -> ScoreTable:
    """Return the table of scores. ``numbers`` maps (candidate's name, column) to the score."""
    scores = [next((score for (_, c), score in numbers.items() if c == column), None) for column in columns]
    shares = [score is not None and score.metric in SHARES for score in scores]
    higher = [score is None or score.higher_is_better is not False for score in scores]
    titles = [
        f"{column.title} {score.metric}" if score and not column.heading and score.metric != "acc" else column.title
        for column, score in zip(columns, scores, strict=True)
    ]
    guessed = [100.0 * score.chance if score and score.chance is not None else math.nan for score in scores]
    averaged = [at for at, share in enumerate(shares) if share]
    if len(averaged) > 1:
        titles, higher, shares = [*titles, AVERAGE], [*higher, True], [*shares, True]
        guessed.append(statistics.fmean(guessed[at] for at in averaged))
    lines = []
    for arm in dict.fromkeys(candidate.arm for candidate in candidates):
        runs = [candidate for candidate in candidates if candidate.arm == arm]
        evaluated = [run for run in runs if not run.left_out]
        listed = [[numbers.get((run.name, column)) for column in columns] for run in evaluated]
        by_run = [[s.value * (100.0 if s.metric in SHARES else 1.0) if s else math.nan for s in row] for row in listed]
        if len(averaged) > 1:  # NaN if a score is missing, so that all averages are over the same tasks
            by_run = [[*row, statistics.fmean(row[at] for at in averaged)] for row in by_run]
        finite = [[row[at] for row in by_run if math.isfinite(row[at])] for at in range(len(titles))]
        means = tuple(statistics.fmean(values) if values else math.nan for values in finite)
        stds = tuple(statistics.stdev(values) if len(values) > 1 else math.nan for values in finite)
        left_out = Counter(run.left_out for run in runs if run.left_out)
        lines.append(ScoreLine(arm=arm, means=means, stds=stds, runs=len(evaluated), left_out=left_out))
    best = tuple(_best([line.means[at] for line in lines], up) for at, up in enumerate(higher))
    return ScoreTable(
        headings=tuple(titles), lines=tuple(lines), best=best, shares=tuple(shares), chance=tuple(guessed)
    )


def _best(values: Sequence[float], higher: bool) -> tuple[int, ...]:
    finite = [value for value in values if math.isfinite(value)]
    best = f"{(max if higher else min)(finite):.2f}" if finite else None
    return tuple(at for at, value in enumerate(values) if f"{value:.2f}" == best)


def _latex(text: str) -> str:
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(named.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in " ".join(text.split()))
