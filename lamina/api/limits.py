"""The largest learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api.comparing import some_ran
from lamina.api.job import job
from lamina.api.pages import page_of
from lamina.api.results import Comparison
from lamina.jobs.names import RESULTS
from lamina.studies.max_rate_settings import MaxRateStudySettings

if TYPE_CHECKING:
    from lamina.jobs.folder import Resume


@job(MaxRateStudySettings)
def max_lr(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> Comparison:
    """Find the largest learning rate of each placement, as `lamina max-lr` does; ``settings`` are its flags.

    Returns the rows of results.csv (``max_learning_rate``, ``stop_rule`` and ``loss_at_stop`` of every placement and
    seed) and the page, OUTPUT/report.html. ``placements`` and ``seeds`` may also be lists.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) if every trial failed; the page is still written.
    """
    from lamina.studies.max_rate import max_lr as run

    folder = Path(str(settings.get("output", MaxRateStudySettings.output)))
    with page_of(folder, RESULTS):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return Comparison(some_ran(results), folder)
