"""Writes docs/results, the pages of the claims, docs/which-placement.md and what `lamina diagnose` cites."""

from __future__ import annotations

import json
from pathlib import Path

import decisions
import ladder_page
import tables
from results_pages import link, on_scale, read_folders, write_drawing, write_results
from verdict_words import findings

from lamina.lab.papers.engine.verdicts import all_verdicts
from lamina.lab.papers.study_catalog import names, read_study, records_folder
from lamina.reports.causes import CAUSES
from lamina.reports.diagnosis import FINDINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "results"
ADVICE = ROOT / "docs" / "which-placement.md"


def write(folder: Path = PAGES, *, draw: bool = True, advice: Path = ADVICE, cited: Path = FINDINGS) -> list[Path]:
    """Write the pages and the page of advice; ``draw``: the figures, too. Returns the paths of the pages."""
    studies = [read_study(name) for name in names()]
    verdicts, records = all_verdicts(), records_folder()
    trials = ladder_page.losses(records)
    figures = ladder_page.drawings(trials)
    pages = write_results(verdicts, studies, records, folder, draw=draw, ladder=ladder_page.section(trials, figures))
    for figure in figures if draw else ():
        write_drawing(figure, folder)
    scale = on_scale([ran for study in studies for ran in read_folders(study, records).values()])
    links = {study.name: f"results/{link(study)}" for study in studies}
    advice.write_text(tables.filled(decisions.page(verdicts, scale, links), ADVICE), encoding="utf-8")
    names_cited = {claim for cause in CAUSES.values() for claim in cause.claims}
    sentences = {name: text for name, text in sorted(findings(verdicts).items()) if name in names_cited}
    cited.write_text(json.dumps(sentences, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return pages


if __name__ == "__main__":
    print(f"{len(write())} pages in {PAGES.relative_to(ROOT)}, and {ADVICE.relative_to(ROOT)}")
