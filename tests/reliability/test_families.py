"""A few families in every run of the tests, all of them in the whole; and the page says what the record says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from scripts import loaded

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

from families import cases_of, suite  # noqa: E402
from record import RIGHT  # noqa: E402


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "deberta-v2"])
def test_probes_of_a_family_equal_plain_formulas(family: str):
    cases = cases_of(family)
    assert not [(case.group, case.detail) for case in cases if case.outcome != RIGHT]
    assert len(cases) >= 11


@pytest.mark.parametrize("family", ["xlnet", "squeezebert", "hiera", "swin", "t5"])
def test_what_is_no_stream_of_tokens_is_refused_as_a_whole(family: str):
    (case,) = cases_of(family)
    assert case.group == "refused as a whole"
    assert case.outcome == RIGHT, case.detail


@pytest.mark.slow
def test_every_family():
    assert not [(c.group, c.name, c.detail) for c in suite(0, 0) if c.outcome != RIGHT]


def test_the_pages_list_the_families_of_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")  # as for the script itself
    module = loaded("docs/tables.py")
    page = (ROOT / "docs" / "probes.md").read_text(encoding="utf-8")
    assert module.filled(page) == page, "run python docs/tables.py"
    record = ROOT / "docs" / "reliability" / "families.json"
    if record.is_file():
        data = json.loads(record.read_text(encoding="utf-8"))
        families, wrong = data["families"], {fault["name"] for fault in data["faults"]}
        assert f"{len(set(families['measured']) - wrong)} families" in page
        assert all(f"`{name}`" in page for name in (*families["measured"], *families["refused"]))
