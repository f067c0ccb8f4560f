"""The end of a run: its result.json is written, whatever ended it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError, mark_reported
from lamina.jobs.files import disk_full, full_disk, write_json
from lamina.jobs.folder import clear
from lamina.jobs.names import METRICS, RESULT
from lamina.jobs.status import Status
from lamina.training.execution.processes import GONE, Processes, lost_another


def recorded(run: Callable[[], Json], folder: Path, processes: Processes, *, resumes: bool, seconds: float) -> Json:
    """Run, and write result.json unless a UserError ends it.

    A new run that a UserError ends before its first record leaves the folder as empty as it was. ``seconds``: the run's
    time before it was resumed.
    """
    began = time.monotonic()

    def write(result: Json) -> Json:
        result["seconds"] = round(seconds + time.monotonic() - began, 2)
        if processes.first:
            write_json(folder / RESULT, result)
        return result

    try:
        result = run()
    except KeyboardInterrupt:
        return write({"status": str(Status.INTERRUPTED), "reason": "stopped at once"})
    except UserError:
        if processes.first and not resumes and not (folder / METRICS).is_file():
            clear(folder)
        raise
    except Exception as error:
        if disk_full(error):
            full = full_disk(folder)
            if not processes.first:
                mark_reported(full)  # one line for all processes
            raise full from error
        reason = GONE if lost_another(error) else f"{type(error).__name__}: {error}"
        write({"status": str(Status.FAILED), "reason": reason})
        raise
    return processes.by_first(lambda: write(result))
