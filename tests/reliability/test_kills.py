"""The suite of kills: one run killed twice, and the whole of it."""

import pytest
from reliability import kills
from reliability.record import RIGHT


@pytest.mark.slow
def test_kills_change_nothing():
    cases = list(kills.suite(104, 1))
    assert len(cases) >= 100
    assert {case.group for case in cases} == set(kills.CONFIGURATIONS)
    assert [case for case in cases if case.outcome != RIGHT] == []


def test_two_kills_change_nothing():
    cases = list(kills.suite(2, 0, ("plain",)))
    assert [case.outcome for case in cases] == [RIGHT, RIGHT], cases
