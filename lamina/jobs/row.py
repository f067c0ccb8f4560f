"""The description of a job as data (its row). From the row, Lamina makes the job's command and Python function.

A new job needs settings, a function, a page (``lamina.reports.registry.report_of``), the text to print
(``ending_of``), and a row. All parts of a job belong to the job's package. Import heavy packages inside the row's
functions. ``lamina.catalog`` lists the rows.
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
    """The options of every job that are not settings: resume, overwrite and the progress bar."""

    resume: Resume
    overwrite: bool
    bar: bool


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A flag of a job that is not a setting.

    Attributes:
        prints: whether the flag changes the text that the command prints at the end. Register the text with
            ``ending_of(kind, switch=name)``.
        draws: whether the flag also saves the page's figures as pictures. The Python function then has the flag, too.
        passed: whether ``JobRow.run`` takes the switch. The Python function then has the flag, too.
        fails: a function of the result that says whether the exit code is 1.
    """

    name: str
    help: str
    prints: bool = False
    draws: bool = False
    passed: bool = False
    fails: Callable[..., bool] | None = None


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job: its command, its Python function and its page.

    Attributes:
        name: the command's name.
        function: the Python function's name, if it is not the command's name with underscores.
        kind: the kind of the job's folder.
        summary: a line for ``lamina --help``.
        about: the description for the command's help. The Python function's docstring has only the first paragraph.
        settings: a function that returns the class of the job's settings.
        run: the function that runs the job. The function's keyword arguments are the settings, resume, overwrite,
            bar, and each switch whose ``passed`` is true.
        returns: one or two sentences about the Python function's result.
        outcome: the type of the result, a class of ``lamina.api.results``, or "pd.DataFrame".
        raises: the errors for the Python function's documentation.
        resumes: the help text of --resume; empty for a job that does not resume.
        positional: the names of the settings without a flag. If a name ends in "...", the setting takes any number of
            words.
        listing: a function that returns the list (such as all probes) that --help and --list print.
        inputs: the settings that name models to start from, the main model's setting first.
        files: the settings that name data or code.
        fails: a function of the result that says whether the exit code is 1.
        folder: a function that returns the default output folder, if this default depends on other settings.
        pages: a function that imports the modules of page and printed text, if ``lamina.reports`` does not import them.
        extra: the package's extra that the job needs.
        own_command: whether a module of ``lamina.commands`` holds the command.
    """

    name: str
    function: str = ""
    kind: str
    summary: str
    about: str
    examples: str = ""
    settings: Callable[[], type[Settings]]
    run: Callable[..., Json | Frame]
    returns: str
    outcome: str = "RunResult"
    raises: str = "a corpus that can't be read"
    resumes: str = "continue the job in the output folder"
    positional: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    listing: Callable[..., str] | None = None
    inputs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    fails: Callable[..., bool] | None = None
    folder: Callable[[Given], Path | None] | None = None
    pages: Callable[[], object] | None = None
    extra: str = "train"
    own_command: bool = False

    @property
    def function_name(self) -> str:
        return self.function or self.name.replace("-", "_")

    def folder_of(self, settings: Given) -> Path | None:
        """Return the output folder for the user's settings; None for a job without an output folder."""
        if self.folder:
            return self.folder(settings)
        output = settings.get("output", self.settings().default("output"))
        return None if output is None else Path(str(output))


MODEL = "OUTPUT/model is the model, and OUTPUT/report.html shows the run."
CHECKPOINT = "resume from the last checkpoint in the output folder"

JOBS: dict[str, JobRow] = {}
"""All rows, by the commands' names. ``lamina.catalog`` fills this mapping."""


def refuse_other_kind(folder: Path, row: JobRow) -> None:
    """Raise UserError if another kind of job wrote the folder to resume.

    If environment.json is damaged, Lamina decides by the job's files, and writes environment.json again.
    """
    kind = kind_of(folder)
    if kind in (row.kind, None):
        return
    owner = next((other.name for other in JOBS.values() if other.kind == kind), None)
    wrote = f"lamina {owner}" if owner else "lamina convert" if kind == Kind.MODEL else "lamina.watch"
    raise UserError(
        f"output: {str(folder)!r} was written by {wrote}, so lamina {row.name} can't resume it. Give the folder of "
        f"a lamina {row.name}, or a new folder."
    )
