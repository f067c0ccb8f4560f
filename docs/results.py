"""Writes docs/results, the pages of the claims, from studies/records: ``python docs/results.py``."""

from __future__ import annotations

from pathlib import Path

from lamina.reports.results import write_results
from lamina.studies.catalog.places import catalog_folder, names
from lamina.studies.catalog.study import read_study
from lamina.studies.engine.verdicts import all_verdicts

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "results"


def write(folder: Path = PAGES, *, draw: bool = True) -> list[Path]:
    """Write the pages; ``draw``: their figures, too. Returns the paths of the pages."""
    studies = [read_study(name) for name in names()]
    return write_results(all_verdicts(), studies, catalog_folder() / "records", folder, draw=draw)


if __name__ == "__main__":
    print(f"{len(write())} pages in {PAGES.relative_to(ROOT)}")
