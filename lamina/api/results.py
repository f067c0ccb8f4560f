"""The results of Lamina's Python functions: the numbers, the folder and the report page of a job."""

from __future__ import annotations

import webbrowser
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.core.json_types import Json
from lamina.errors import TrialsFailed, UserError
from lamina.jobs.files import read_claims
from lamina.jobs.names import PAGE

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = ("placement", "learning_rate", "seed", "status", "eval_loss", "max_learning_rate", "stop_rule", "reason")


class _HasPage:
    """The base class for results of a job that wrote a report page into its folder."""

    folder: Path

    @property
    def _page(self) -> Path:
        return self.folder / PAGE

    def report(self, *, show: bool = False) -> Path:
        """Return the path of the report page. If ``show`` is true, also open the page in the browser."""
        if show:
            webbrowser.open(self._page.resolve().as_uri())
        return self._page

    def _link(self) -> str:
        page = self._page
        return f'<p>the page: <a href="{escape(page.resolve().as_uri())}">{escape(str(page))}</a></p>'


class Comparison(_HasPage):
    """The results of a job with several runs. A Comparison has all methods of the DataFrame ``results``.

    Attributes:
        results: the table of results.csv, with a row for each run.
        folder: the job's folder.
    """

    results: pd.DataFrame

    def __init__(self, results: pd.DataFrame, folder: Path) -> None:
        self.results, self.folder = results, Path(folder)

    @classmethod
    def of(cls, results: pd.DataFrame, folder: Path) -> Comparison:
        """Return the Comparison for a job's results. Raises TrialsFailed if every run failed."""
        if "status" in results and set(results["status"]) == {"failed"}:
            raise TrialsFailed(results)
        return cls(results, folder)

    def __getitem__(self, key: Any) -> Any:
        return self.results[key]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.results)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "results":
            raise AttributeError(name)
        return getattr(self.results, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.results)})

    def _shown(self) -> pd.DataFrame:
        columns = [name for name in _SHOWN if name in self.results]
        return self.results.loc[:, columns] if columns else self.results

    def __repr__(self) -> str:
        return f"{self._shown().to_string(index=False)}\nthe page: {self.report()}"

    def _repr_html_(self) -> str:
        return self._shown().to_html(index=False, border=0, na_rep="") + self._link()


@dataclass(frozen=True, kw_only=True, repr=False)
class StudyOutcome(_HasPage):
    """The outcome of a study.

    Attributes:
        results: the table of results.csv, with a row for each run.
        claims: the verdicts, as in claims.json.
        folder: the study's folder.
    """

    results: pd.DataFrame
    claims: list[Json]
    folder: Path

    @classmethod
    def of(cls, results: pd.DataFrame, folder: Path) -> StudyOutcome:
        return cls(results=results, claims=read_claims(folder) or [], folder=folder)

    def __repr__(self) -> str:
        lines = [f"{claim['verdict']:<13} {claim['claim']}: {claim['says']}" for claim in self.claims]
        return "\n".join([f"{len(self.results)} trials", *lines, f"the page: {self.report()}"])

    def _repr_html_(self) -> str:
        cells = [(claim["verdict"], claim["claim"], claim["says"], claim.get("ours") or "") for claim in self.claims]
        rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in cells)
        return f"<table>{rows}</table>{self._link()}"


class RunResult(_HasPage, dict[str, object]):
    """The content of result.json as a dict. The attribute ``folder`` is the job's folder."""

    def __init__(self, result: Mapping[str, object], folder: Path) -> None:
        super().__init__(result)
        self.folder = Path(folder)

    @classmethod
    def of(cls, result: Mapping[str, object], folder: Path) -> RunResult:
        return cls(result, folder)

    @property
    def model(self) -> Path | None:
        """Return the folder of the trained model, or None if the job saved no model."""
        model = self.folder / "model"
        return model if model.is_dir() else None

    def _repr_html_(self) -> str:
        plain = {name: value for name, value in self.items() if value is None or isinstance(value, str | int | float)}
        rows = (f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in plain.items())
        return f"<table>{''.join(rows)}</table>{self._link()}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis(_HasPage):
    """The diagnosis of a run.

    Attributes:
        sentences: the likely cause with its step and layer, and what to change.
        page: the path of the page with the figures, or None if packages for the figures are missing.
    """

    sentences: list[str]
    page: Path | None

    @property
    def _page(self) -> Path:
        if self.page is None:
            raise UserError(f"page: {self.sentences[-1]}")
        return self.page

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, f"the page: {self.page}"])

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(text)}</p>" for text in self.sentences) + self._link()
