import pytest
from training.tiny_runs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lamina-cache")


@pytest.fixture(autouse=True)
def shared_cache(session_cache, monkeypatch):
    """The blocks are packed once for all the tests here."""
    monkeypatch.setenv("LAMINA_CACHE", str(session_cache))
