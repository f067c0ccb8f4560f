"""Jobs over several widths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api import pages
from lamina.api.comparing import some_ran
from lamina.api.job import job
from lamina.api.results import Comparison
from lamina.jobs.names import TRANSFER
from lamina.studies.width_settings import CoordCheckSettings, TransferSettings

if TYPE_CHECKING:
    from lamina.jobs.folder import Resume


@job(CoordCheckSettings)
def coord_check(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> Comparison:
    """Check whether any module's output grows with the width, as `lamina coord-check` does.

    Returns the rows of slopes.csv and the page, OUTPUT/report.html; OUTPUT/result.json has the verdict.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.studies.coordinates import coord_check as run

    folder = Path(str(settings.get("output", CoordCheckSettings.output)))
    slopes = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    pages.write_page(folder)
    return Comparison(slopes, folder)


@job(TransferSettings)
def transfer(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> Comparison:
    """Try learning rates on a narrow proxy and carry them over to a wide target, as `lamina transfer` does.

    Returns the rows of results.csv and the page, OUTPUT/report.html; OUTPUT/transfer.json holds the interval, the
    target's rates and the risk.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) if every trial failed; the page is still written.
    """
    from lamina.studies.transfer import transfer as run

    folder = Path(str(settings.get("output", TransferSettings.output)))
    with pages.page_of(folder, TRANSFER):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return Comparison(some_ran(results), folder)
