"""The jobs from Python, as the command line does them: train or measure, then write the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import TrialsFailed
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json, write_text

if TYPE_CHECKING:
    import pandas as pd

    from lamina.jobs.folder import Resume


def compare(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Train placements side by side, as `lamina compare` does; ``settings`` are its flags with underscores.

    Returns the rows of results.csv; OUTPUT/report.html is the page. ``placements``, ``learning_rates`` and ``seeds``
    may be lists, too. The worker processes do not import the script that calls it.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) where every trial failed; the page is written all the same.
    """
    from lamina.reports import study_report
    from lamina.studies.compare import compare as run
    from lamina.studies.settings import CompareSettings

    with _page(study_report, Path(settings.get("output", CompareSettings.output)), "results.csv"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def probe_folder(
    *, png: bool = False, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any
) -> dict[str, Any]:
    """Measure a checkpoint into a folder, as `lamina probe` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/report.html is the page, OUTPUT/NAME.parquet the table of the probe NAME.
    ``lamina.probe`` gives the tables alone and writes nothing.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a checkpoint or a corpus that can't be read, an output
            folder in use.
    """
    from lamina.probes.job.folder import probe_folder as run
    from lamina.probes.job.settings import ProbeSettings
    from lamina.reports import probing_report
    from lamina.reports.pictures import draw

    folder = Path(settings.get("output", ProbeSettings.output))
    with _page(probing_report, folder, "result.json"):
        result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    if png:
        draw(folder)
    return result


def pretrain(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> dict[str, Any]:
    """Train one model, as `lamina pretrain` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
    """
    from lamina.reports import run_report
    from lamina.training.execution.processes import launched
    from lamina.training.pretrain import pretrain as run
    from lamina.training.settings import PretrainSettings

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    if launched()[0] == 0:  # of several processes the first one writes
        run_report(Path(settings.get("output", PretrainSettings.output)))
    return result


def preflight(*, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Say of planned runs whether they will train, as `lamina preflight` does; ``settings`` are its flags.

    Returns a row a planned run: its verdict ("fine", "risky", "undecided" or "will not train"), the reason, what to
    change, and the numbers that these rest on (docs/preflight.md). With ``output`` the folder gets preflight.csv,
    layers.parquet, preflight.json (what `lamina report` makes the page of) and report.html.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
    """
    from lamina.jobs import folder as run_folder
    from lamina.preflights.running import layer_table, run_preflight, table
    from lamina.preflights.settings import PreflightSettings

    made = PreflightSettings.from_dict(settings)
    if made.output is None:
        return table(run_preflight(made, bar=bar))
    target = Path(made.output)
    run_folder.refuse(target, resume=False, overwrite=overwrite)
    found = run_preflight(made, bar=bar)
    rows, layers = table(found), layer_table(found)
    with run_folder.lock(target):
        run_folder.claim(target, resume=False, overwrite=overwrite)
        write_json(target / "environment.json", environment(made.seed))
        write_text(target / "preflight.csv", rows.to_csv(index=False))
        layers.to_parquet((target / "layers.parquet").absolute(), index=False)
        losses = [item.burn_in.losses for item in found]
        records = {"command": made.command(), "rows": rows.to_dict("records"), "losses": losses}
        write_json(target / "preflight.json", records)
        from lamina.reports.preflight import preflight_report

        preflight_report(target)
    return rows


def coord_check(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Check whether any module's output grows with the width, as `lamina coord-check` does.

    Returns the rows of slopes.csv; OUTPUT/result.json has the verdict, OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
    """
    from lamina.reports.coordinates import coordinates_report
    from lamina.studies.coordinates import coord_check as run
    from lamina.studies.width_settings import CoordCheckSettings

    made = CoordCheckSettings.from_dict(settings)
    found = run(made, resume=resume, overwrite=overwrite, bar=bar)
    coordinates_report(Path(made.output))
    return found


def transfer(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Try learning rates on a narrow proxy and carry them over to a wide target, as `lamina transfer` does.

    Returns the rows of results.csv; OUTPUT/transfer.json holds the interval, the target's rates and the risk,
    OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) where every trial failed; the page is written all the same.
    """
    from lamina.reports.transfer import transfer_report
    from lamina.studies.transfer import transfer as run
    from lamina.studies.width_settings import TransferSettings

    with _page(transfer_report, Path(settings.get("output", TransferSettings.output)), "transfer.json"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def _some_ran(results: pd.DataFrame) -> pd.DataFrame:
    """The results as they are. Raises TrialsFailed where no trial ran."""
    if set(results["status"]) == {"failed"}:
        raise TrialsFailed(results)
    return results


@contextmanager
def _page(report: Callable[[Path], Any], folder: Path, result: str) -> Iterator[None]:
    """Write the page once the work is done; an interrupted one gets that of what is there, if its ``result`` is."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / result).is_file():
            report(folder)
        raise
    report(folder)
