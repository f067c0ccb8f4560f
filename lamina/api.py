"""The jobs from Python, as the command line does them: train or measure, then write the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.core.json_types import Json
from lamina.errors import TrialsFailed

if TYPE_CHECKING:
    import pandas as pd

    from lamina.jobs.folder import Resume


def compare(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Train placements side by side, as `lamina compare` does; ``settings`` are its flags with underscores.

    Returns the rows of results.csv; the page is OUTPUT/report.html. ``placements``, ``learning_rates`` and ``seeds``
    may also be lists. The worker processes do not import the calling script.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) if every trial failed; the page is still written.
    """
    from lamina.studies.compare import compare as run
    from lamina.studies.settings import CompareSettings

    with _page(settings.get("output", CompareSettings.output), "results.csv"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def probe_folder(
    *, png: bool = False, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any
) -> Json:
    """Measure a checkpoint and write a folder, as `lamina probe` does; ``settings`` are its flags with underscores.

    Returns what result.json holds. OUTPUT/report.html is the page; OUTPUT/NAME.parquet is the table of the probe NAME.
    ``lamina.probe`` returns only the tables and writes nothing.

    Raises:
        UserError: (a ValueError) for invalid settings, a checkpoint or a corpus that can't be read, an output
            folder in use.
    """
    from lamina.probes.engine.settings import ProbeSettings
    from lamina.probes.job.folder import probe_folder as run
    from lamina.reports.pictures import draw

    output = settings.get("output", ProbeSettings.output)
    with _page(output, "result.json"):
        result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    if png:
        draw(Path(output))
    return result


def pretrain(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Train one model, as `lamina pretrain` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
    """
    from lamina.training.pretrain import pretrain as run
    from lamina.training.settings import PretrainSettings

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    _write_page_once(settings.get("output", PretrainSettings.output))
    return result


def sft(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Fine-tune a model, as `lamina sft` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.settings import SftSettings
    from lamina.posttraining.sft import sft as run

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    _write_page_once(settings.get("output", SftSettings.output))
    return result


def reward(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Train a reward model, as `lamina reward` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.reward import reward as run
    from lamina.posttraining.settings import RewardSettings

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    _write_page_once(settings.get("output", RewardSettings.output))
    return result


def rlhf(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Train a policy by reinforcement learning, as `lamina rlhf` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.rlhf import rlhf as run
    from lamina.posttraining.settings import RlhfSettings

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    _write_page_once(settings.get("output", RlhfSettings.output))
    return result


def dpo(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Train a policy on preferences, as `lamina dpo` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.dpo import dpo as run
    from lamina.posttraining.settings import DpoSettings

    result = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    _write_page_once(settings.get("output", DpoSettings.output))
    return result


def preflight(*, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Say whether planned runs will train, as `lamina preflight` does; ``settings`` are its flags.

    Returns one row per planned run: its verdict ("fine", "risky", "undecided" or "will not train"), the reason, what to
    change, and the numbers behind them (docs/preflight.md). With ``output``, it also writes a folder: preflight.csv,
    layers.parquet, preflight.json (from which `lamina report` makes the page) and report.html.

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
        TrialsFailed: (a UserError) if every trial failed; the page is still written.
    """
    from lamina.studies.transfer import transfer as run
    from lamina.studies.width_settings import TransferSettings

    with _page(settings.get("output", TransferSettings.output), "transfer.json"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def max_lr(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Find the largest learning rate that each placement bears, as `lamina max-lr` does; ``settings`` are its flags.

    Returns the rows of results.csv: ``max_learning_rate``, ``stop_rule`` and ``loss_at_stop`` of every placement and
    seed. OUTPUT/report.html is the page. ``placements`` and ``seeds`` may also be lists.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, an output folder in use.
        TrialsFailed: (a UserError) if every trial failed; the page is still written.
    """
    from lamina.studies.max_rate import max_lr as run
    from lamina.studies.max_rate_settings import MaxRateStudySettings

    with _page(settings.get("output", MaxRateStudySettings.output), "results.csv"):
        results = run(settings, resume=resume, overwrite=overwrite, bar=bar)
    return _some_ran(results)


def evaluate(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> Json:
    """Evaluate models, as `lamina eval` does; ``settings`` are its flags with underscores.

    ``models`` (paths of checkpoints, runs and studies) and ``tasks`` may also be lists. Returns what result.json holds;
    OUTPUT/results.csv has every number, OUTPUT/table.csv the table, OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for invalid settings, an unknown task, data or a checkpoint that can't be read, an
            output folder in use.
    """
    from lamina.evaluation.job import evaluate as run
    from lamina.evaluation.settings import EvalSettings
    from lamina.studies.evaluated import runs_of

    with _page(settings.get("output", EvalSettings.output), "result.json"):
        return run(settings, resume=resume, overwrite=overwrite, bar=bar, expand=runs_of)


@dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """What a study found.

    Attributes:
        results: a row per trial, as in results.csv.
        claims: the verdicts, as in claims.json.
        folder: the study's.
    """

    results: pd.DataFrame
    claims: list[Json]
    folder: Path


def study(
    *, record: bool = False, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: Any
) -> StudyOutcome:
    """Run a study and judge its claims, as `lamina study run` does; ``settings`` are its flags with underscores.

    ``study`` is a name of the catalog or the YAML file of your own; OUTPUT/report.html is the page.

    Raises:
        UserError: (a ValueError) for invalid settings, a study that can't be read or has changed since it ran, an
            output folder in use, a claim over something that was not measured.
    """
    from lamina.studies.engine.run import output_of, run_study
    from lamina.studies.engine.verdicts import read_claims

    folder = output_of(settings)
    with _page(str(folder), "results.csv"):
        results = run_study(settings, record=record, resume=resume, overwrite=overwrite, bar=bar)
    return StudyOutcome(results=results, claims=read_claims(folder) or [], folder=folder)


def _some_ran(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results. Raises TrialsFailed if every trial failed."""
    if set(results["status"]) == {"failed"}:
        raise TrialsFailed(results)
    return results


@contextmanager
def _page(output: str, result: str) -> Iterator[None]:
    """Write the page once the work is done. If it is interrupted, write the page only if the file ``result`` exists."""
    try:
        yield
    except KeyboardInterrupt:
        if (Path(output) / result).is_file():
            _write_page(Path(output))
        raise
    _write_page(Path(output))


def _write_page_once(output: str) -> None:
    """Write the page in the first of several processes."""
    from lamina.training.execution.processes import launched

    if launched()[0] == 0:
        _write_page(Path(output))


def _write_page(folder: Path) -> None:
    from lamina.reports import report

    report(folder)
