"""Studies with claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.api.job import job
from lamina.api.pages import page_of
from lamina.api.results import StudyOutcome
from lamina.jobs.names import RESULTS
from lamina.papers.engine.settings import StudySettings

if TYPE_CHECKING:
    from lamina.jobs.folder import Resume


@job(StudySettings)
def study(
    *,
    record: bool = False,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
    **settings: object,
) -> StudyOutcome:
    """Run a study and judge its claims, as `lamina study run` does; ``settings`` are its flags with underscores.

    ``study`` is a name of the catalog or the YAML file of your own; OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for invalid settings, a study that can't be read or has changed since it ran, an
            output folder in use, a claim over something that was not measured.
    """
    from lamina.papers.engine.run import output_of, run_study
    from lamina.papers.engine.verdicts import read_claims

    folder = output_of(settings)
    with page_of(folder, RESULTS):
        results = run_study(settings, record=record, resume=resume, overwrite=overwrite, bar=bar)
    return StudyOutcome(results=results, claims=read_claims(folder) or [], folder=folder)
