import pytest
from training.tiny_runs import SMALL, flags, write_corpus

from lamina.studies.settings import CompareSettings


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lamina-cache")


@pytest.fixture(autouse=True)
def shared_cache(session_cache, monkeypatch):
    """One for all the tests here: the server that forks the trials keeps the environment that it was started with."""
    monkeypatch.setenv("LAMINA_CACHE", str(session_cache))


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
