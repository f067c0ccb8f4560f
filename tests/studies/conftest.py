import pytest
from training import tiny_runs
from training.tiny_runs import SMALL, flags

from lamina.studies.settings import CompareSettings

corpus = tiny_runs.corpus


@pytest.fixture
def study(corpus, tmp_path):
    """Settings of a tiny study in ``tmp_path / name``."""

    def make(name="study", **changed):
        given = {"corpus": str(corpus), "placements": "pre_ln,keel", "learning_rates": "3e-3", "workers": 2}
        return CompareSettings(output=str(tmp_path / name), **{**SMALL, **given, **changed})

    return make


@pytest.fixture
def command(corpus, tmp_path):
    """The command line of the same study."""

    def make(name="study", **changed):
        given = {**SMALL, "placements": "pre_ln,keel", "learning_rates": "3e-3", "workers": 2, **changed}
        return ["compare", *flags(corpus=corpus, output=tmp_path / name, **given)]

    return make
