"""The suite of kills: one run killed twice, and the whole of it."""

import pytest
from reliability import kills, stages
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


def test_the_job_of_every_configuration_is_there():
    assert all(callable(stages.job_named(how["job"])) for how, _ in kills.CONFIGURATIONS.values() if "job" in how)
