"""Writes docs/results, the pages of the claims, and docs/which-placement.md from studies/records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from lamina.reports.results import write_results
from lamina.studies.catalog.places import catalog_folder, names
from lamina.studies.catalog.study import read_study
from lamina.studies.engine.verdicts import all_verdicts

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "results"
ADVICE = ROOT / "docs" / "which-placement.md"


def write(folder: Path = PAGES, *, draw: bool = True, advice: Path = ADVICE) -> list[Path]:
    """Write the pages and the page of advice; ``draw``: the figures, too. Returns the paths of the pages."""
    studies = [read_study(name) for name in names()]
    verdicts = all_verdicts()
    pages = write_results(verdicts, studies, catalog_folder() / "records", folder, draw=draw)
    lines = (folder / "index.md").read_text(encoding="utf-8").splitlines()
    scale = next((line for line in lines if line.startswith("At scale")), "")
    advice.write_text(_decisions().page(verdicts, scale), encoding="utf-8")
    return pages


def _decisions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decisions", ROOT / "docs" / "decisions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(f"{len(write())} pages in {PAGES.relative_to(ROOT)}, and {ADVICE.relative_to(ROOT)}")
