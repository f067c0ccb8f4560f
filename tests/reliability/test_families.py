"""A few families in every run of the tests, all of them in the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
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
