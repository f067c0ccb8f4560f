"""The tables as the papers print them: a line per model, or per arm of a study, and a column per number."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence
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

    mean: float = math.nan
    std: float = math.nan
    runs: int = 0

    @staticmethod
    def of(values: Sequence[float]) -> Cell:
        """The cell of some runs' values."""
        if not values:
            return Cell()
        std = statistics.stdev(values) if len(values) > 1 else math.nan
        return Cell(mean=statistics.fmean(values), std=std, runs=len(values))

    def text(self, plus_minus: str = "±") -> str:
        """``41.34 ± 0.52``; a dash where there is no number."""
        if not self.runs:
            return "–"
        std = f" {plus_minus} {self.std:.2f}" if math.isfinite(self.std) else ""
        return f"{self.mean:.2f}{std}"


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
    left_out: dict[str, int]

    @property
    def label(self) -> str:
        """The name, with the runs that were left out."""
        reasons = ", ".join(f"{count} of {self.runs + sum(self.left_out.values())} runs {reason}"
                            for reason, count in sorted(self.left_out.items()))  # fmt: skip
        return f"{self.arm} ({reasons})" if reasons else self.arm


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
        return {
            "headings": list(self.headings),
            "best": list(self.best),
            "shares": list(self.shares),
            "lines": lines,
        }

    def csv(self) -> str:
        """As CSV, with a column of means and one of standard deviations per number."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "runs", "left_out", *(f"{h}{end}" for h in self.headings for end in ("", " std"))])
        for line in self.lines:
            numbers = [_plain(value) for cell in line.cells for value in (cell.mean, cell.std)]
            writer.writerow([line.arm, line.runs, sum(line.left_out.values()), *numbers])
        return out.getvalue()

    def markdown(self) -> str:
        """As a Markdown table."""
        rows = [["model", *self.headings], ["---", *["---:"] * len(self.headings)]]
        rows += [[_escaped(line.label, "|\\`*_<>[]", "\\"), *self._texts(line)] for line in self.lines]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def latex(self) -> str:
        """As a LaTeX table with booktabs' rules; the best number of each column is bold, in every line that has it."""
        head = " & ".join(["Model", *(_latex(heading) for heading in self.headings)])
        body = []
        for number, line in enumerate(self.lines):
            texts = self._texts(line, r"$\pm$", "--")
            bold = [
                rf"\textbf{{{text}}}" if number in self.best[at] and len(self.lines) > 1 else text
                for at, text in enumerate(texts)
            ]
            body.append(" & ".join([_latex(line.label), *bold]) + r" \\")
        columns = "l" + "r" * len(self.headings)
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head + r" \\", r"\midrule", *body]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def _texts(self, line: ScoreLine, plus_minus: str = "±", dash: str = "–") -> list[str]:
        if not line.runs:
            return [FAILED, *[dash] * (len(self.headings) - 1)]
        return [cell.text(plus_minus).replace("–", dash) for cell in line.cells]


def table(
    columns: Sequence[Wanted], candidates: Sequence[Candidate], numbers: dict[tuple[str, Wanted], Score]
) -> ScoreTable:
    """The table of what is measured; ``numbers`` are the columns' scores by candidate's name and column."""
    arms = list(dict.fromkeys(one.arm for one in candidates))
    known = {at: next((s for (_, c), s in numbers.items() if c == column), None) for at, column in enumerate(columns)}
    shares = [at for at, score in known.items() if score is not None and score.metric in SHARES]
    lines = [_line(arm, columns, candidates, numbers, shares) for arm in arms]
    titles = [column.title if not (s := known[at]) or column.heading or s.metric == "acc" else
              f"{column.title} {s.metric}" for at, column in enumerate(columns)]  # fmt: skip
    higher = [not (score := known[at]) or score.higher_is_better is not False for at in range(len(columns))]
    if len(shares) > 1:
        titles, higher, shares = [*titles, AVERAGE], [*higher, True], [*shares, len(columns)]
    best = tuple(_best([line.cells[at].mean for line in lines], up) for at, up in enumerate(higher))
    return ScoreTable(
        headings=tuple(titles), lines=tuple(lines), best=best, shares=tuple(at in shares for at in range(len(titles)))
    )


def _line(
    arm: str,
    columns: Sequence[Wanted],
    candidates: Sequence[Candidate],
    numbers: dict[tuple[str, Wanted], Score],
    shares: list[int],
) -> ScoreLine:
    runs = [one for one in candidates if one.arm == arm]
    left_out: dict[str, int] = {}
    for one in runs:
        if one.left_out:
            left_out[one.left_out] = left_out.get(one.left_out, 0) + 1
    evaluated = [one for one in runs if not one.left_out]
    by_run = [[_printed(numbers.get((one.name, column))) for column in columns] for one in evaluated]
    cells = [Cell.of([row[at] for row in by_run if math.isfinite(row[at])]) for at in range(len(columns))]
    if len(shares) > 1:
        # a run's average counts only if the run has every number: else the averages are of different tasks
        means = [statistics.fmean(row[at] for at in shares) for row in by_run]
        cells.append(Cell.of([mean for mean in means if math.isfinite(mean)]))
    return ScoreLine(arm=arm, cells=tuple(cells), runs=len(evaluated), left_out=left_out)


def _printed(score: Score | None) -> float:
    if score is None:
        return math.nan
    return 100.0 * score.value if score.metric in SHARES else score.value


def _best(values: Sequence[float], higher: bool) -> tuple[int, ...]:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ()
    best = f"{(max if higher else min)(known):.2f}"
    return tuple(at for at, value in enumerate(values) if f"{value:.2f}" == best)


def _plain(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _escaped(text: str, marks: str, before: str) -> str:
    return "".join(f"{before}{c}" if c in marks else c for c in " ".join(text.split()))


def _latex(text: str) -> str:
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(named.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in " ".join(text.split()))
