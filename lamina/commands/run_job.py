"""Run a job from the command line: parse the options, call the job's Python function, and print the result."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from lamina.catalog import JOBS
from lamina.commands.arguments import Parser
from lamina.core.json_types import Json
from lamina.core.terminal import show, show_error
from lamina.errors import TrialsFailed
from lamina.jobs.row import JobRow

CODES = {"interrupted": 130, "failed": 1}  # exit codes by a result's status


def parser(name: str) -> Parser:
    if name in JOBS and not JOBS[name].own_command:
        return parser_of(JOBS[name])
    return importlib.import_module(f"lamina.commands.{name}").parser()


def parser_of(row: JobRow) -> Parser:
    about = row.about + (f"\n{row.listing()}" if row.listing else "")
    words = "".join(f"{name.removesuffix('s...') + '...' * name.endswith('...')} " for name in row.positional).upper()
    flags = Parser(row.name, about, row.examples, words)
    flags.add_settings(row.settings(), row.positional)
    if row.listing:
        flags.add_flag("--list", "print the list at the top of this help with all details, and exit", False)
    for switch in row.switches:
        flags.add_flag(f"--{switch.name.replace('_', '-')}", switch.help, False)
    flags.add_output_modes(row.resumes)
    return flags


def run(row: JobRow, argv: Sequence[str]) -> int:
    settings, options = parser_of(row).settings_from(argv)
    if row.listing and options.list:
        show(row.listing(full=True))
        return 0
    from lamina.api.job_functions import run_row

    switches = [switch for switch in row.switches if getattr(options, switch.name)]
    modes: Json = {switch.name: True for switch in switches if switch.draws or switch.passed}
    modes |= {"resume": options.resume} if row.resumes else {}
    modes["overwrite"] = options.overwrite
    failure = None
    try:
        result = run_row(row, settings, modes)
    except TrialsFailed as error:
        result, failure = error.results, error
    except KeyboardInterrupt:
        if row.resumes:
            raise
        show_error(f"interrupted: `lamina {row.name}` saved nothing")
        return CODES["interrupted"]
    code = CODES.get(str(result.get("status")), 0) if isinstance(result, Mapping) else 0
    from lamina.modeling.processes import launched
    from lamina.reports import ending

    if launched()[0] > 0:  # only the first process prints
        return code
    folder = row.folder_of(settings)
    rows = getattr(result, "results", result)
    show(ending(row.kind, next((switch.name for switch in switches if switch.prints), ""))(folder, rows))
    if code == CODES["interrupted"]:
        show(f"to resume: lamina {row.name} --output {folder} --resume")
    if failure is not None:
        show_error(str(failure))
        return 1
    fails = [row.fails, *(switch.fails for switch in switches)]
    return max(code, *(int(decides(result)) for decides in fails if decides), 0)
