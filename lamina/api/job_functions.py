"""The Python function of a job, made from its row: it refuses early, runs the job and writes the page."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

from lamina.api import results
from lamina.api.objects import as_settings
from lamina.core.values import path, taken
from lamina.errors import UserError, did_you_mean
from lamina.jobs.aliases import in_our_words, suggestion
from lamina.jobs.catalog import JobRow, load, refuse_other_kind
from lamina.jobs.folder import in_use, refuse
from lamina.jobs.model_folder import refuse_as_output
from lamina.jobs.names import RESULT, RESULTS, TRANSFER
from lamina.jobs.settings import Settings

ENDED = (RESULT, RESULTS, TRANSFER)  # an interrupted job with one of them gets a page


@cache
def function_of(row: JobRow) -> Callable[..., Any]:
    """The function of a job.

    It takes the settings by keyword, also by other tools' names, as lists, paths and data sets, and ``resume``,
    ``overwrite``, ``bar`` and the row's switches.
    """
    record, modes = row.record, _modes(row)

    def act(**given: Any) -> Any:
        chosen = {mode.name: given.pop(mode.name, mode.default) for mode in modes}
        settings = as_settings(in_our_words(given, record.names()))
        for name in settings:
            if name not in record.names():
                hint = did_you_mean(suggestion(name, record.names()))
                raise UserError(f"unknown setting {name!r}{hint} (see `lamina {record.command_name} --help all`)")
        if "output" in settings:
            path("output", settings["output"])
        folder = row.folder_of(settings)
        if os.environ.get("WORLD_SIZE", "1") in ("", "1"):  # of several processes the first one speaks, in the job
            _refuse(row, record, settings, folder, chosen)
        after = [switch.after for switch in row.switches if switch.after and chosen.pop(switch.name)]
        with _page_of(folder):
            result = load(row.run)(settings, **chosen)
        for action in after:
            load(action)(folder)
        kind = getattr(results, row.outcome, None)
        return result if kind is None else kind.of(result, folder)

    act.__name__ = act.__qualname__ = row.function_name
    act.__doc__ = _documentation(row)
    act.__dict__["__signature__"] = _signature(row, record, modes)
    act.__dict__["record"] = record
    return act


def _modes(row: JobRow) -> list[inspect.Parameter]:
    of_row = [(switch.name, False, "bool") for switch in row.switches if switch.after or switch.passed]
    resume = [("resume", False, "Resume")] if row.resumes else []
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default, kind in (*of_row, *resume, ("overwrite", False, "bool"), ("bar", True, "bool"))
    ]


def _signature(row: JobRow, record: type[Settings], modes: list[inspect.Parameter]) -> inspect.Signature:
    """Build a job's signature: a keyword per setting, with its type and default, then the modes."""
    settings = []
    for name in record.names():
        kind, wanted = record.kind(name), taken(record.check_of(name))
        if wanted is not None:
            kind = wanted | None if type(None) in get_args(kind) else wanted
        default = record.default(name)
        settings.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return inspect.Signature([*settings, *modes], return_annotation=row.outcome)


def _documentation(row: JobRow) -> str:
    about = " ".join(row.about.split("\n\n")[0].split())
    returns = f"As `lamina {row.name}` does; the keywords are its settings. {row.returns}"
    raises = f"UserError: (a ValueError) for invalid settings, {row.raises}, an output folder in use."
    failed = ["TrialsFailed: (a UserError) if every trial failed; the page is still written."]
    errors = [raises, *(failed if row.outcome == "Comparison" else [])]
    listed = [textwrap.fill(error, 110, initial_indent="    ", subsequent_indent=" " * 8) for error in errors]
    return "\n".join([textwrap.fill(about, 110), "", textwrap.fill(returns, 110), "", "Raises:", *listed, ""])


def _refuse(
    row: JobRow, record: type[Settings], given: Mapping[str, Any], folder: Path | None, modes: Mapping[str, Any]
) -> None:
    """Raise UserError, before torch is loaded, for an output folder in use and for what the settings can check."""
    if folder is not None:
        for name in row.inputs:
            models = given.get(name)
            for model in models if isinstance(models, list | tuple) else [models]:
                if isinstance(model, str):
                    refuse_as_output(str(folder), model)
        resume = modes.get("resume", False)
        refuse(folder, resume=resume, overwrite=modes["overwrite"])
        if resume and in_use(folder):  # its own settings decide, and the job checks them
            refuse_other_kind(folder, row)
            return
    settings = record.from_dict(given)
    settings.require(*record.needed)
    settings.check_names()


@contextmanager
def _page_of(folder: Path | None) -> Iterator[None]:
    """Write the page once the work is done, or is interrupted and has a result."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None and any((folder / name).is_file() for name in ENDED):
            write_page(folder)
        raise
    if folder is not None:
        write_page(folder)


def write_page(folder: Path) -> None:
    """Write a folder's page, in the first of several processes."""
    from lamina.reports import report
    from lamina.training.execution.processes import launched

    if launched()[0] == 0:
        report(folder)
