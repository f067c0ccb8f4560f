"""Writes docs/results from the records of studies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import write_text
from lamina.jobs.names import CLAIMS, RESULTS
from lamina.papers.catalog.study import Study
from lamina.papers.pages import interactive, printed
from lamina.papers.pages.choice import drawings
from lamina.papers.pages.drawing import Drawing
from lamina.papers.pages.folder import StudyFolder, read_folder
from lamina.papers.results.pages import index, study_page

_FIGURES_OF_A_PAGE = 3
_DIGITS = 5  # of the numbers in a figure


def write_results(
    verdicts: Sequence[Json], studies: Sequence[Study], records: Path, folder: Path, *, draw: bool = True
) -> list[Path]:
    """Write a page of all claims and a page per study; returns the paths of the pages.

    ``folder`` holds nothing else: what an earlier call wrote and this one did not is deleted.

    Args:
        verdicts: as ``all_verdicts`` gives them, with those that were not run.
        studies: the catalog.
        records: a folder ``STUDY-SCALE`` for each study that ran.
        draw: whether the figures are drawn, too (SVG, and JSON for the site); it needs matplotlib.
    """
    (folder / printed.FIGURES).mkdir(parents=True, exist_ok=True)
    pages: dict[Path, str] = {}
    drawn: set[Path] = set()
    folders: list[StudyFolder] = []
    for study in studies:
        places = {scale: records / f"{study.name}-{scale}" for scale in study.scales}
        ran = {scale: read_folder(place) for scale, place in places.items() if _is_whole(place)}
        figures = {scale: drawings(one)[:_FIGURES_OF_A_PAGE] for scale, one in ran.items()}
        folders += ran.values()
        pages[folder / f"{study.name}.md"] = study_page(study, verdicts, ran, figures)
        if draw:
            for drawing in (drawing for listed in figures.values() for drawing in listed):
                drawn |= _draw(drawing, folder / printed.FIGURES)
    pages[folder / "index.md"] = index(studies, verdicts, folders)
    for path, text in pages.items():
        write_text(path, text)
    stale = [*folder.glob("*.md"), *((folder / printed.FIGURES).iterdir() if draw else ())]
    for path in stale:
        if path not in pages and path not in drawn:
            path.unlink()
    return sorted(pages)


def _is_whole(folder: Path) -> bool:
    """Whether it is the record of a study that has ended: one that was stopped has no verdicts."""
    return all((folder / name).is_file() for name in (RESULTS, CLAIMS))


def _draw(drawing: Drawing, folder: Path) -> set[Path]:
    path = folder / f"{drawing.name}.json"
    figure = _rounded(json.loads(str(interactive.plot(drawing).to_json())))
    write_text(path, json.dumps(figure, separators=(",", ":"), allow_nan=False) + "\n")
    return {path, *printed.write(drawing, folder, ["svg"])}


def _rounded(value: object) -> object:
    """Numbers with as many digits as a figure shows: the same file on every machine."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items() if name != "template"}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
