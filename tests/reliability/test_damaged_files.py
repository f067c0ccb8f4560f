"""The suite of damaged files: a few of each kind that takes no time, and the whole of it."""

import random

import pytest
from reliability import damaged_files
from reliability.record import RIGHT


@pytest.mark.slow
def test_no_damage_is_believed_or_a_traceback():
    cases = list(damaged_files.suite(230, 1))
    assert len(cases) == 230
    assert {case.group for case in cases} == {kind for _, kind, _ in damaged_files.SHARES}
    assert [case for case in cases if case.outcome != RIGHT] == []


class Texts:
    """The part of a bench that the cache's cases need."""

    number = 0

    def __init__(self, root):
        self.root, self.corpus = root, damaged_files.write_corpus(root / "words.txt")


@pytest.mark.parametrize("harm", damaged_files.HARMS)
def test_damage_to_the_cache(tmp_path, harm):
    case = damaged_files.damaged_cache(Texts(tmp_path), harm, random.Random(0))
    assert case.outcome == RIGHT, case
