"""Comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api.job import job
from lamina.api.pages import page_of
from lamina.api.results import Comparison
from lamina.errors import TrialsFailed
from lamina.jobs.names import RESULTS
from lamina.studies.settings import CompareSettings

if TYPE_CHECKING:
    import pandas as pd

    from lamina.jobs.folder import Resume


@job(CompareSettings)
def compare(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> Comparison:
    """Train placements side by side, as `lamina compare` does; ``settings`` are its flags with underscores.

    Returns the rows of results.csv and the page, OUTPUT/report.html. ``placements``, ``learning_rates`` and ``seeds``
    may also be lists, ``corpus`` a path, a list of paths or texts, or a datasets.Dataset. The worker processes do not
    import the calling script.

    >>> import lamina
    >>> lamina.compare(placements=["pre_ln", "kel"])
    Traceback (most recent call last):
    ...
    lamina.errors.UserError: unknown placement 'kel'; did you mean 'keel'? (allowed: admin, ...)

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) if every trial failed; the page is still written.
    """
    from lamina.studies.compare import compare as run

    folder = Path(str(settings.get("output", CompareSettings.output)))
    with page_of(folder, RESULTS):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return Comparison(some_ran(results), folder)


def some_ran(results: pd.DataFrame) -> pd.DataFrame:
    """The results. Raises TrialsFailed if every trial failed."""
    if set(results["status"]) == {"failed"}:
        raise TrialsFailed(results)
    return results
