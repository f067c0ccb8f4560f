"""The jobs from Python, as the command line does them: train or measure, then write the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.core.json_types import Json
from lamina.errors import TrialsFailed

if TYPE_CHECKING:
    import pandas as pd

    from lamina.jobs.folder import Resume


def compare(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Train placements side by side, as `lamina compare` does; ``settings`` are its flags with underscores.

    Returns the rows of results.csv; OUTPUT/report.html is the page. ``placements``, ``learning_rates`` and ``seeds``
    may be lists, too. The worker processes do not import the script that calls it.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) where every trial failed; the page is written all the same.
    """
    from lamina.studies.compare import compare as run
    from lamina.studies.settings import CompareSettings

    with _page(Path(settings.get("output", CompareSettings.output)), "results.csv"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def probe_folder(
    *, png: bool = False, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any
) -> Json:
    """Measure a checkpoint into a folder, as `lamina probe` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/report.html is the page, OUTPUT/NAME.parquet the table of the probe NAME.
    ``lamina.probe`` gives the tables alone and writes nothing.

    Raises:
        UserError: (a ValueError) for invalid settings, a checkpoint or a corpus that can't be read, an output
            folder in use.
    """
    from lamina.probes.engine.settings import ProbeSettings
    from lamina.probes.job.folder import probe_folder as run
    from lamina.reports.pictures import draw

    folder = Path(settings.get("output", ProbeSettings.output))
    with _page(folder, "result.json"):
        result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    if png:
        draw(folder)
    return result


def pretrain(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Train one model, as `lamina pretrain` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.training.execution.processes import launched
    from lamina.training.pretrain import pretrain as run
    from lamina.training.settings import PretrainSettings

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    if launched()[0] == 0:  # of several processes the first one writes
        _write_page(Path(settings.get("output", PretrainSettings.output)))
    return result


def preflight(*, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Say of planned runs whether they will train, as `lamina preflight` does; ``settings`` are its flags.

    Returns one row per planned run: its verdict ("fine", "risky", "undecided" or "will not train"), the reason, what to
    change, and the numbers that these rest on (docs/preflight.md). With ``output`` the folder gets preflight.csv,
    layers.parquet, preflight.json (what `lamina report` makes the page of) and report.html.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.preflights.job import preflight as run

    rows = run(settings, overwrite=overwrite, bar=bar)
    if settings.get("output") is not None:
        _write_page(Path(settings["output"]))
    return rows


def coord_check(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Check whether any module's output grows with the width, as `lamina coord-check` does.

    Returns the rows of slopes.csv; OUTPUT/result.json has the verdict, OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.studies.coordinates import coord_check as run
    from lamina.studies.width_settings import CoordCheckSettings

    slopes = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    _write_page(Path(settings.get("output", CoordCheckSettings.output)))
    return slopes


def transfer(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Try learning rates on a narrow proxy and carry them over to a wide target, as `lamina transfer` does.

    Returns the rows of results.csv; OUTPUT/transfer.json holds the interval, the target's rates and the risk,
    OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) where every trial failed; the page is written all the same.
    """
    from lamina.studies.transfer import transfer as run
    from lamina.studies.width_settings import TransferSettings

    with _page(Path(settings.get("output", TransferSettings.output)), "transfer.json"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def _some_ran(results: pd.DataFrame) -> pd.DataFrame:
    """The results as they are. Raises TrialsFailed where no trial ran."""
    if set(results["status"]) == {"failed"}:
        raise TrialsFailed(results)
    return results


@contextmanager
def _page(folder: Path, result: str) -> Iterator[None]:
    """Write the page once the work is done; an interrupted one gets that of what is there, if its ``result`` is."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / result).is_file():
            _write_page(folder)
        raise
    _write_page(folder)


def _write_page(folder: Path) -> None:
    from lamina.reports import report

    report(folder)
