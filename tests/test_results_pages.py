"""The results pages: they compare each paper's placement with Pre-LN, and show all that the records compare."""

import json
from pathlib import Path

import pytest
from scripts import loaded

from lamina.lab.papers.engine.verdicts import all_verdicts
from lamina.lab.papers.study_catalog import read_study, records_folder

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def pages():
    return loaded("docs/results_pages.py")


def differences(pages, *names):
    studies = [read_study(name) for name in names]
    folders = [(study, folder) for study in studies for folder in pages.read_folders(study, records_folder()).values()]
    return [each for study, folder in folders for each in pages.against_pre_ln.differences(study, folder)]


def test_a_difference_to_pre_ln_is_the_difference_of_the_claim(pages):
    found = {(one.study, one.placement): one for one in differences(pages, "front-page", "ladder-s2")}
    for study, placement in found:
        claims = json.loads((records_folder() / f"{study}-cpu" / "claims.json").read_text("utf-8"))
        name = {"fusenorm": study}.get(placement, f"{study}/{placement.replace('_', '-')}")
        claim = next(claim for claim in claims if claim["claim"] == name)
        assert found[study, placement].finding.margin == pytest.approx(claim["margin"], abs=1e-5)
    keel = found["front-page", "keel"], found["ladder-s2", "keel"]
    assert [(one.side, one.unit) for one in keel] == [("higher", "nats per byte"), ("lower", "nats per token")]
    assert [round(one.parameters / 1e6, 2) for one in keel] == [0.90, 1.08]


def test_runs_that_two_studies_share_count_once(pages):
    found = [one for one in differences(pages, "front-page", "keel-redundancy") if one.placement == "keel"]
    assert [one.study for one in found] == ["front-page", "keel-redundancy"]
    assert [one.study for one in pages.against_pre_ln.once(found)] == ["front-page"]
    (sentence,) = pages.against_pre_ln.sentences("keel-redundancy", found)
    assert sentence == "In these models, Keel's loss is 0.048 nats per byte higher than Pre-LN's loss."


@pytest.mark.parametrize("paper", ["fusenorm", "keel", "mix-ln", "peri-ln"])
def test_a_papers_page_begins_with_its_placement_against_pre_ln(paper):
    text = (PAGES / f"{paper}.md").read_text("utf-8")
    assert " better than Pre-LN on our models?" in text.split("\n## ")[1]
    assert "](ours.md#front-page)" in text


def test_the_details_show_every_comparison_of_the_records(pages):
    text = {page.stem: page.read_text("utf-8") for page in PAGES.glob("*.md")}
    lines = 0
    for claim in all_verdicts():
        page = text[pages.PAPERS[pages.paper_of(read_study(claim["study"]))][0]]
        details = page.split(f"### {claim['study']}\n")[1].split("\n### ")[0]
        quantity, named = pages.comparisons.quantity_of(claim)
        for line in claim.get("parts") or [claim["ours"]]:
            if line and line != "not measured":
                shown = pages.comparisons.read(str(line), quantity, named=named)
                assert f"| {shown.what} |" in details, claim["claim"]
                lines += 1
    assert lines > 300


def test_the_shares_of_the_advice_are_on_the_page():
    page, advice = (ROOT / "docs" / name for name in ("results/keel.md", "which-placement.md"))
    assert "| keel | 1.783 | 1.476 | 0.019 | 71 % | 17 % |" in page.read_text("utf-8")
    assert "the first block caused 71 %" in advice.read_text("utf-8")
    assert "| keel, normal, 4 layers | 2.9 to 3.07 | 0.997 to 0.998 | 2.9 to 3.06 |" in page.read_text("utf-8")
    assert "by 1.2 to 3.1." in advice.read_text("utf-8")
