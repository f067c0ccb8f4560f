"""The command `lamina study` in Lamina's catalog of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lamina.core.frames import Frame
from lamina.jobs.kinds import Kind
from lamina.jobs.row import Given, JobRow, Modes, Switch

if TYPE_CHECKING:
    from lamina.lab.papers.engine.settings import StudySettings


def study_settings() -> type[StudySettings]:
    from lamina.lab.papers.engine.settings import StudySettings

    return StudySettings


def run_study(settings: Given, *, record: bool = False, **modes: Unpack[Modes]) -> Frame:
    from lamina.lab.papers.engine.study_run import run_study

    return run_study(settings, record=record, **modes)


def study_folder(settings: Mapping[str, object]) -> Path | None:
    from lamina.lab.papers.engine.study_run import output_of

    return output_of(settings)


def study_pages() -> object:
    from lamina.lab.papers.pages import page

    return page


STUDY = JobRow(
    name="study",
    kind=Kind.CLAIMS,
    summary="run, list or show studies, which reproduce results of four papers and judge the papers' claims",
    about="Run a study and judge its claims, as `lamina study run` does.",
    settings=study_settings,
    run=run_study,
    returns="``study`` is a name from `lamina study list`, or your YAML file. OUTPUT/report.html shows the verdicts.",
    outcome="StudyOutcome",
    raises="a study that can't be read or has changed since it ran",
    switches=(
        Switch(name="record", help="also copy the tables and verdicts to the --records folder", passed=True),
        Switch(name="dry_run", help="print the number of parameters, tokens, FLOPs and GPU-hours, without training"),
    ),
    positional=("study",),
    folder=study_folder,
    pages=study_pages,
    own_command=True,
)
