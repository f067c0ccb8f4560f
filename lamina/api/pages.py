"""When a job's page is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def page_of(output: Path, result: str) -> Iterator[None]:
    """Write the page once the work is done. If it is interrupted, write the page only if the file ``result`` exists."""
    try:
        yield
    except KeyboardInterrupt:
        if (output / result).is_file():
            write_page(output)
        raise
    write_page(output)


def write_page_once(output: Path) -> None:
    """Write the page in the first of several processes."""
    from lamina.training.execution.processes import launched

    if launched()[0] == 0:
        write_page(output)


def write_page(folder: Path) -> None:
    """Write a folder's page."""
    from lamina.reports import report

    report(folder)
