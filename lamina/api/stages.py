"""The stages after pretraining."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api import pages
from lamina.api.job import job
from lamina.api.results import RunResult
from lamina.posttraining.settings import DpoSettings, RewardSettings, RlhfSettings, SftSettings

if TYPE_CHECKING:
    from lamina.core.json_types import Json
    from lamina.jobs.folder import Resume


@job(SftSettings)
def sft(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> RunResult:
    """Fine-tune a model, as `lamina sft` does; ``settings`` are its flags with underscores.

    ``data`` may also be a list of rows or a datasets.Dataset. Returns what result.json holds; OUTPUT/model is the
    model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.sft import sft as run

    folder = Path(str(settings.get("output", SftSettings.output)))
    return _with_page(run(settings, resume=resume, overwrite=overwrite, bar=bar), folder)


@job(RewardSettings)
def reward(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> RunResult:
    """Train a reward model, as `lamina reward` does; ``settings`` are its flags with underscores.

    ``data`` may also be a list of rows or a datasets.Dataset. Returns what result.json holds; OUTPUT/model is the
    model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.reward import reward as run

    folder = Path(str(settings.get("output", RewardSettings.output)))
    return _with_page(run(settings, resume=resume, overwrite=overwrite, bar=bar), folder)


@job(RlhfSettings)
def rlhf(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> RunResult:
    """Train a policy by reinforcement learning, as `lamina rlhf` does; ``settings`` are its flags with underscores.

    ``data`` may also be a list of rows or a datasets.Dataset. Returns what result.json holds; OUTPUT/model is the
    model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.rlhf import rlhf as run

    folder = Path(str(settings.get("output", RlhfSettings.output)))
    return _with_page(run(settings, resume=resume, overwrite=overwrite, bar=bar), folder)


@job(DpoSettings)
def dpo(*, resume: Resume = False, overwrite: bool = False, bar: bool = True, **settings: object) -> RunResult:
    """Train a policy on preferences, as `lamina dpo` does; ``settings`` are its flags with underscores.

    ``data`` may also be a list of rows or a datasets.Dataset. Returns what result.json holds; OUTPUT/model is the
    model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, an output folder in use.
    """
    from lamina.posttraining.dpo import dpo as run

    folder = Path(str(settings.get("output", DpoSettings.output)))
    return _with_page(run(settings, resume=resume, overwrite=overwrite, bar=bar), folder)


def _with_page(result: Json, folder: Path) -> RunResult:
    pages.write_page_once(folder)
    return RunResult(result, folder)
