"""A page that is written again whenever the records of its running job have grown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.folder import is_locked
from lamina.jobs.kinds import kind_of
from lamina.jobs.names import ALARMS, CLAIMS, METRICS, RESULT, RESULTS
from lamina.reports.registry import report

RECORDS = (METRICS, RESULTS, RESULT, ALARMS, CLAIMS)


def follow(
    folder: Path, *, every: float = 10.0, wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Path | None, str]]:
    """Write the page of a run or a study each time its records have grown, until the job has ended.

    Args:
        folder: of the job; a study's trials are followed with it.
        every: seconds between two looks.
        wait: sleeps.

    Yields:
        the page, and an empty text; or None and why there is no page yet: too few records.

    Raises:
        UserError: if the folder is not a job's.
    """
    if kind_of(folder) is None:
        report(folder)  # raises
    before: list[tuple[str, int, int]] | None = None
    while True:
        ended, state = has_ended(folder), _state(folder)
        if state != before:
            before = state
            try:
                yield report(folder), ""
            except UserError as error:
                if ended:
                    raise
                yield None, str(error)  # a job that has only begun
        if ended:
            return
        wait(every)


def has_ended(folder: Path) -> bool:
    """Whether nothing more is going to be written: there is a result, and no process works in the folder."""
    return not is_locked(folder) and any((folder / name).is_file() for name in (RESULT, RESULTS))


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Return the names, sizes and times of the record files, also of a study's trials."""
    found = []
    for place in (folder, *sorted(folder.glob("trials/*"))):
        for name in RECORDS:
            try:
                stat = os.stat(place / name)
            except OSError:
                continue
            found.append((str(place / name), stat.st_size, stat.st_mtime_ns))
    return found
