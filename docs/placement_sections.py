"""The sections of docs/placements.md, a heading for each placement; run it to draw their pictures."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from results_pages import PAPERS, paper_of

from lamina.jobs.files import write_text
from lamina.lab.papers.study_catalog import names as study_names
from lamina.lab.papers.study_catalog import read_study, records_folder
from lamina.placements import get, names, resolve
from lamina.placements.diagram import svg

PICTURES = Path(__file__).resolve().parent / "placements"
LAYERS = 4  # of a drawing
_STATED = (
    "keel",
    "layernorm_scaling",
    "mix_ln",
    "peri_ln",
)  # their papers state N(0, 0.02^2), other sources state none
_ARXIV = r"([^, ][^,]*) \(arXiv (\d{4}\.\d{5})\)"  # a paper and its number


def sections() -> str:
    """All placements, in the order of their headings."""
    ordered = sorted(names(), key=lambda name: get(name).heading.lower())
    return "\n\n".join(part for name in ordered for part in _section(name))


def _section(name: str) -> Iterator[str]:
    placement = get(name)
    yield f"## {placement.heading}"
    yield placement.description.split("\n\n")[0]
    yield f"![{placement.heading}](placements/{name}.svg)"
    yield "\n".join(["```text", *placement.equation, "```"])
    yield f'`lamina.build(config, "{name}")`'
    yield placement.advice
    told = placement.initialization != "normal" or name in _STATED
    facts = {
        "Initializer": f"`{placement.initialization}`" if told else "",
        "Evidence": _evidence(name),
    }
    yield ". ".join([linked(placement.source), *(f"**{fact}:** {text}" for fact, text in facts.items() if text)])


def linked(source: str) -> str:
    """The papers of a source as links."""
    return re.sub(_ARXIV, r"[\1](https://arxiv.org/abs/\2)", source.replace("; ", ", "))


def _evidence(name: str) -> str:
    pages = trained().get(name, ())
    if len(pages) == len(PAPERS):
        return "[all results](evidence.md#which-placement-is-better)"
    links = [f"[{page}](results/{page}.md)" for paper, (page, *_) in PAPERS.items() if paper in pages]
    return ", ".join(links)


@functools.cache
def trained() -> dict[str, set[str]]:
    """By placement, the papers whose studies have trained it."""
    found: dict[str, set[str]] = {}
    for study in map(read_study, study_names()):
        for path in records_folder().glob(f"{study.name}-*/results.csv"):
            table = pd.read_csv(path, usecols=lambda column: column == "placement", dtype=str)
            for spec in table["placement"].dropna().unique() if "placement" in table else ():
                found.setdefault(spec.partition("(")[0], set()).add(paper_of(study))
    return found


def pictures() -> dict[Path, str]:
    """Each placement's drawing by its file."""
    return {PICTURES / f"{name}.svg": svg(resolve(name, LAYERS), title=get(name).title) for name in names()}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for path, text in pictures().items():
        write_text(path, text)
