"""The tables as the papers print them: a line per model, or per arm of a study, and a column per number."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.core.json_types import Json
from lamina.evaluation.candidates import Candidate
from lamina.evaluation.scores import SHARES, Score
from lamina.evaluation.task_sets import Wanted

AVERAGE = "Avg."
FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of a line: the mean over its runs, in percent for shares.

    Attributes:
        mean: over the runs; NaN where there is none.
        std: sample standard deviation over the runs; NaN for fewer than two.
        runs: with the number.
    """

    mean: float
    std: float
    runs: int

    @staticmethod
    def of(values: Sequence[float]) -> Cell:
        """Return the cell of some runs' values, of which only the finite ones count."""
        finite = [value for value in values if math.isfinite(value)]
        std = statistics.stdev(finite) if len(finite) > 1 else math.nan
        return Cell(mean=statistics.fmean(finite) if finite else math.nan, std=std, runs=len(finite))

    def text(self, plus_minus: str, dash: str) -> str:
        """Return ``41.34 ± 0.52``; a dash where there is no number."""
        std = f" {plus_minus} {self.std:.2f}" if math.isfinite(self.std) else ""
        return f"{self.mean:.2f}{std}" if self.runs else dash


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """A line of the table.

    Attributes:
        arm: its name.
        cells: a number per column.
        runs: evaluated.
        left_out: the runs that were not, by reason: ``{"diverged": 2}``.
    """

    arm: str
    cells: tuple[Cell, ...]
    runs: int
    left_out: Mapping[str, int]

    @property
    def label(self) -> str:
        """The name, with the runs that were left out."""
        total = self.runs + sum(self.left_out.values())
        reasons = ", ".join(f"{count} of {total} runs {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{self.arm} ({reasons})" if reasons else self.arm

    def texts(self, plus_minus: str = "±", dash: str = "–") -> list[str]:
        """Return the cells as printed."""
        if not self.runs:
            return [FAILED, *[dash] * (len(self.cells) - 1)]
        return [cell.text(plus_minus, dash) for cell in self.cells]


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """All lines under their headings; the last column is the average of the shares if there are several.

    Attributes:
        headings: of the columns.
        lines: of the table.
        best: the lines with each column's best number, as printed.
        shares: whether each column is a share, printed in percent.
    """

    headings: tuple[str, ...]
    lines: tuple[ScoreLine, ...]
    best: tuple[tuple[int, ...], ...]
    shares: tuple[bool, ...]

    def to_json(self) -> Json:
        """Return the table for the page."""
        lines = [
            {
                "arm": line.arm,
                "runs": line.runs,
                "left_out": line.left_out,
                "mean": [cell.mean for cell in line.cells],
                "std": [cell.std for cell in line.cells],
            }
            for line in self.lines
        ]
        return {"headings": [*self.headings], "best": [*self.best], "shares": [*self.shares], "lines": lines}

    def csv(self) -> str:
        """Return CSV, with a column of means and one of standard deviations per number."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "runs", "left_out", *(f"{h}{end}" for h in self.headings for end in ("", " std"))])
        for line in self.lines:
            numbers = [value for cell in line.cells for value in (cell.mean, cell.std)]
            texts = [f"{value:.6g}" if math.isfinite(value) else "" for value in numbers]
            writer.writerow([line.arm, line.runs, sum(line.left_out.values()), *texts])
        return out.getvalue()

    def markdown(self) -> str:
        """Return a Markdown table."""
        rows = [["model", *self.headings], ["---", *["---:"] * len(self.headings)]]
        for line in self.lines:
            label = "".join(f"\\{c}" if c in "|\\`*_<>[]" else c for c in " ".join(line.label.split()))
            rows.append([label, *line.texts()])
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def latex(self) -> str:
        """Return a LaTeX table with booktabs' rules; every occurrence of a column's best number is bold."""
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
    """Return the table of what is measured; ``numbers`` are the columns' scores by candidate's name and column."""
    scores = [next((score for (_, c), score in numbers.items() if c == column), None) for column in columns]
    shares = [score is not None and score.metric in SHARES for score in scores]
    higher = [score is None or score.higher_is_better is not False for score in scores]
    titles = [
        f"{column.title} {score.metric}" if score and not column.heading and score.metric != "acc" else column.title
        for column, score in zip(columns, scores, strict=True)
    ]
    averaged = [at for at, share in enumerate(shares) if share]
    if len(averaged) > 1:
        titles, higher, shares = [*titles, AVERAGE], [*higher, True], [*shares, True]
    lines = []
    for arm in dict.fromkeys(candidate.arm for candidate in candidates):
        runs = [candidate for candidate in candidates if candidate.arm == arm]
        evaluated = [run for run in runs if not run.left_out]
        by_run = [[_printed(numbers.get((run.name, column))) for column in columns] for run in evaluated]
        if len(averaged) > 1:  # NaN for a run without every number: else the averages are of different tasks
            by_run = [[*row, statistics.fmean(row[at] for at in averaged)] for row in by_run]
        cells = tuple(Cell.of([row[at] for row in by_run]) for at in range(len(titles)))
        left_out = Counter(run.left_out for run in runs if run.left_out)
        lines.append(ScoreLine(arm=arm, cells=cells, runs=len(evaluated), left_out=left_out))
    best = tuple(_best([line.cells[at].mean for line in lines], up) for at, up in enumerate(higher))
    return ScoreTable(headings=tuple(titles), lines=tuple(lines), best=best, shares=tuple(shares))


def _printed(score: Score | None) -> float:
    if score is None:
        return math.nan
    return 100.0 * score.value if score.metric in SHARES else score.value


def _best(values: Sequence[float], higher: bool) -> tuple[int, ...]:
    finite = [value for value in values if math.isfinite(value)]
    best = f"{(max if higher else min)(finite):.2f}" if finite else None
    return tuple(at for at, value in enumerate(values) if f"{value:.2f}" == best)


def _latex(text: str) -> str:
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(named.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in " ".join(text.split()))
