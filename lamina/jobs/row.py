"""The description of a job (``JobRow``). From this description, Lamina makes the job's command and Python function.

A new job needs settings, a function, a page (``lamina.reports.registry.report_of``), the text to print (``ending_of``),
and a ``JobRow`` in ``lamina.catalog``. A function of a ``JobRow`` must import heavy packages only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.kinds import Kind, kind_of

if TYPE_CHECKING:
    from lamina.jobs.folder import Resume
    from lamina.jobs.settings import Settings


Given = Mapping[str, object]
"""A job's settings by name, as the user gives them."""


class Modes(TypedDict, total=False):
    """The options that every job has in addition to its settings."""

    resume: Resume
    overwrite: bool
    bar: bool


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A flag of a job that is not a setting."""

    name: str
    help: str
    # whether the flag changes the text that the command prints at the end. To register this text, use ``ending_of(kind,
    # switch=name)``
    prints: bool = False
    # whether the flag saves the page's figures as pictures. If true, the Python function also has the flag
    draws: bool = False
    passed: bool = False  # whether ``JobRow.run`` takes the flag. If true, the Python function also has the flag
    # a function that takes the result and returns whether the command exits with code 1
    fails: Callable[..., bool] | None = None


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job with its command, its Python function and its report page."""

    name: str  # the command's name
    function: str = ""  # the Python function's name, if it differs from the command's name
    kind: str
    summary: str  # a line for ``lamina --help``
    about: str  # the text of the command's help. The first paragraph is also the Python function's docstring
    examples: str = ""
    settings: Callable[[], type[Settings]]  # a function that returns the class of the job's settings
    # the function that runs the job. The keyword arguments are the settings, ``resume``, ``overwrite``, ``bar``, and
    # each switch whose ``passed`` is true
    run: Callable[..., Json | Frame]
    returns: str  # one or two sentences about the Python function's result
    outcome: str = "RunResult"  # the result's type: a class of ``lamina.api.results``, or "pd.DataFrame"
    raises: str = "a corpus that can't be read"  # the errors that the Python function's docstring lists
    resumes: str = "continue the job in the output folder"  # the help text of --resume, or "" if the job can't resume
    # the settings that are positional arguments. A name that ends in "..." takes any number of words
    positional: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    # a function that returns the list that --help and --list print, such as all probes
    listing: Callable[..., str] | None = None
    inputs: tuple[str, ...] = ()  # the settings that name models to start from. The main model comes first
    files: tuple[str, ...] = ()  # the settings that name data or code
    # a function that takes the result and returns whether the command exits with code 1
    fails: Callable[..., bool] | None = None
    # a function that returns the output folder, if other settings determine the default folder
    folder: Callable[[Given], Path | None] | None = None
    pages: Callable[[], object] | None = None  # a function that imports the modules of the job's page and printed text
    extra: str = "train"  # the extra in pyproject.toml that installs the job's dependencies
    own_command: bool = False  # whether a module of ``lamina.commands`` implements the command

    @property
    def function_name(self) -> str:
        return self.function or self.name.replace("-", "_")

    def folder_of(self, settings: Given) -> Path | None:
        """Return the output folder for the user's settings, or None for a job without an output folder."""
        if self.folder:
            return self.folder(settings)
        output = settings.get("output", self.settings().default("output"))
        return None if output is None else Path(str(output))


MODEL = "OUTPUT/model is the model, and OUTPUT/report.html shows the run."
CHECKPOINT = "resume from the last checkpoint in the output folder"

JOBS: dict[str, JobRow] = {}
"""All jobs, by the commands' names. ``lamina.catalog`` fills this mapping."""


def refuse_other_kind(folder: Path, row: JobRow) -> None:
    """Raise UserError if another kind of job wrote the folder to resume."""
    kind = kind_of(folder)
    if kind in (row.kind, None):
        return
    owner = next((other.name for other in JOBS.values() if other.kind == kind), None)
    wrote = f"lamina {owner}" if owner else "lamina convert" if kind == Kind.MODEL else "lamina.watch"
    raise UserError(
        f"output: {str(folder)!r} was written by {wrote}, so lamina {row.name} can't resume it. Give the folder of "
        f"a lamina {row.name}, or a new folder."
    )
