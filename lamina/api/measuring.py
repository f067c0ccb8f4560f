"""Measurements of trained models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api.job import job
from lamina.api.pages import page_of
from lamina.api.results import RunResult
from lamina.evaluation.settings import EvalSettings
from lamina.jobs.names import RESULT
from lamina.probes.engine.probe_settings import ProbeSettings

if TYPE_CHECKING:
    from lamina.jobs.folder import Resume


@job(ProbeSettings)
def probe_folder(
    *,
    png: bool = False,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
    **settings: object,
) -> RunResult:
    """Measure a checkpoint and write a folder, as `lamina probe` does; ``settings`` are its flags with underscores.

    Returns what result.json holds. OUTPUT/report.html is the page; OUTPUT/NAME.parquet is the table of the probe NAME.
    ``lamina.probe`` returns only the tables and writes nothing.

    Raises:
        UserError: (a ValueError) for invalid settings, a checkpoint or a corpus that can't be read, an output
            folder in use.
    """
    from lamina.probes.job.probe_folder import probe_folder as run
    from lamina.reports.pictures import draw

    folder = Path(str(settings.get("output", ProbeSettings.output)))
    with page_of(folder, RESULT):
        result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    if png:
        draw(folder)
    return RunResult(result, folder)


@job(EvalSettings)
def evaluate(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> RunResult:
    """Evaluate models, as `lamina eval` does; ``settings`` are its flags with underscores.

    ``models`` (paths of checkpoints, runs and studies) and ``tasks`` may also be lists. Returns what result.json holds;
    OUTPUT/results.csv has every number, OUTPUT/table.csv the table, OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for invalid settings, an unknown task, data or a checkpoint that can't be read, an
            output folder in use.
    """
    from lamina.evaluation.job import evaluate as run
    from lamina.studies.evaluated import runs_of

    folder = Path(str(settings.get("output", EvalSettings.output)))
    with page_of(folder, RESULT):
        return RunResult(run(settings, resume=resume, overwrite=overwrite, bar=bar, expand=runs_of), folder)
