"""Planned and actual training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api import pages
from lamina.api.job import job
from lamina.api.results import RunResult
from lamina.preflights.settings import PreflightSettings
from lamina.training.settings import PretrainSettings

if TYPE_CHECKING:
    import pandas as pd

    from lamina.jobs.folder import Resume


@job(PretrainSettings)
def pretrain(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> RunResult:
    """Train one model, as `lamina pretrain` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page. ``corpus`` may also be a
    path, a list of paths or texts, or a datasets.Dataset.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.training.pretrain import pretrain as run

    folder = Path(str(settings.get("output", PretrainSettings.output)))
    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    pages.write_page_once(folder)
    return RunResult(result, folder)


@job(PreflightSettings)
def preflight(*, overwrite: bool = False, bar: bool = True, **settings: object) -> pd.DataFrame:
    """Say whether planned runs will train, as `lamina preflight` does; ``settings`` are its flags.

    Returns one row per planned run: its verdict ("fine", "risky", "undecided" or "will not train"), the reason, what to
    change, and the numbers behind them (docs/preflight.md). With ``output``, it also writes a folder: preflight.csv,
    layers.parquet, preflight.json (from which `lamina report` makes the page) and report.html.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.preflights.preflight import preflight as run

    rows = run(settings, overwrite=overwrite, bar=bar)
    if settings.get("output") is not None:
        pages.write_page(Path(str(settings["output"])))
    return rows
