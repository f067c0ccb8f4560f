"""The suite of broken models: some of each kind of damage in every run of the tests, and the whole of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models import suite
from record import RIGHT


@pytest.mark.parametrize("count", [25, pytest.param(240, marks=pytest.mark.slow)])
def test_a_broken_model_is_one_line_or_the_model_as_it_is(count):
    cases = list(suite(count, 1))
    assert len(cases) == count
    assert not [(case.group, case.detail) for case in cases if case.outcome != RIGHT]
