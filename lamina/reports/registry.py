"""Find the function that writes a folder's page, and rewrite the page while the job runs."""

from __future__ import annotations

import importlib
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lamina.core.values import nearby, refuse_special
from lamina.errors import UserError
from lamina.jobs.folder import is_locked
from lamina.jobs.kinds import kind_of
from lamina.jobs.names import ALARMS, CLAIMS, METRICS, RESULT, RESULTS
from lamina.jobs.row import JOBS
from lamina.jobs.seals import refuse_page
from lamina.reports.records import whole
from lamina.reports.stages import joined, stages_in

Page = Callable[[Path], Path]
"""A function that writes a folder's page and returns the page's path."""
Ending = Callable[..., str]
"""A function that takes a job's folder and result, and returns the text that the job prints when it ends."""
Drawing = Callable[[Path], Sequence[Path]]
"""A function that saves the figures of a page as pictures and returns the paths of the pictures."""

_RECORDS = (METRICS, RESULTS, RESULT, ALARMS, CLAIMS)
_pages: dict[str, Page] = {}
_endings: dict[tuple[str, str], Ending] = {}
_drawings: dict[str, Drawing] = {}


def report_of(kind: str, *, needs: str = "") -> Callable[[Page], Page]:
    """Register a function that writes the page for one kind of folder. ``needs`` names the job in messages."""

    def register(page: Page) -> Page:
        def checked(folder: Path) -> Path:
            with whole(folder, needs):
                return page(folder)

        _pages[kind] = checked if needs else page
        return page

    return register


def ending_of(*kinds: str, switch: str = "") -> Callable[[Ending], Ending]:
    """Register a function for the text at the end of these kinds of jobs. ``switch``: only for jobs with this flag."""

    def register(ending: Ending) -> Ending:
        _endings.update({(kind, switch): ending for kind in kinds})
        return ending

    return register


def drawing_of(kind: str) -> Callable[[Drawing], Drawing]:
    """Register a function that saves figures as pictures, for one kind of folder."""

    def register(drawing: Drawing) -> Drawing:
        _drawings[kind] = drawing
        return drawing

    return register


def ending(kind: str, switch: str = "") -> Ending:
    """Return the function that formats the text at the end of this kind of job."""
    kinds()
    return _endings[kind, switch]


def draw(folder: Path) -> Sequence[Path]:
    """Save the figures of a page, and return the paths of the pictures. Raises UserError if the page has no figures."""
    kinds()
    kind = kind_of(folder)
    if kind not in _drawings:
        allowed = ", ".join(sorted(_drawings))
        raise UserError(
            f"folder: {str(folder)!r} has no figures to save. Give a folder of one of these kinds: {allowed}."
        )
    refuse_page(folder)
    return _drawings[kind](folder)


def kinds() -> list[str]:
    """Return the kinds of folders that have a page."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "pages")]):
        importlib.import_module(f"lamina.reports.pages.{module.name}")
    importlib.import_module("lamina.reports.terminal")
    for row in JOBS.values():
        if row.pages is not None:
            row.pages()
    return sorted(_pages)


def report(folder: Path) -> Path:
    """Write ``folder/report.html`` for any kind of job, and return the page's path.

    Raises UserError if no job wrote the folder, or if the folder's records are damaged.
    """
    folder = Path(folder)
    refuse_special("folder", folder)
    folder = joined(folder)
    pages, kind = {page_kind: _pages[page_kind] for page_kind in kinds()}, kind_of(folder)
    if kind is None or kind not in pages:
        if not folder.is_dir():
            what = "is a file" if folder.is_file() else f"does not exist{nearby(folder)}"
            raise UserError(
                f"folder: {str(folder)!r} {what}. Give a job's folder. To read another tool's log, run: lamina "
                "diagnose LOG"
            )
        raise UserError(
            f"folder: {str(folder)!r} holds {'no job' if kind is None else f'a {kind}'}, so there is no page to "
            f"write. Give a folder of one of these kinds: {', '.join(pages)}."
        )
    for run in (folder, *sorted(folder.glob("trials/*/"))):
        refuse_page(run)
    return pages[kind](folder)


def follow(
    folder: Path, *, every: float = 10.0, wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Path | None, str]]:
    """Rewrite a page each time the records grow, until the job ends. Yield the path, or None and the reason."""
    runs = stages_in(folder) or [folder]
    if kind_of(runs[0]) is None:
        report(folder)  # raises
    before: list[tuple[str, int, int]] | None = None
    while True:
        ended, state = all(map(has_ended, runs)), [each for run in runs for each in _state(run)]
        if state != before:
            before = state
            try:
                yield report(folder), ""
            except UserError as error:
                if ended:
                    raise
                yield None, str(error)  # the job has only begun
        if ended:
            return
        wait(every)


def has_ended(folder: Path) -> bool:
    """Return whether the job has ended: the folder has a result, and no process works in the folder."""
    return not is_locked(folder) and any((folder / name).is_file() for name in (RESULT, RESULTS))


def _state(folder: Path) -> list[tuple[str, int, int]]:
    files = []
    for run in (folder, *sorted(folder.glob("trials/*"))):
        for name in _RECORDS:
            try:
                stat = os.stat(run / name)
            except OSError:
                continue
            files.append((str(run / name), stat.st_size, stat.st_mtime_ns))
    return files
