import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache."""
    cache = tmp_path / "lamina-cache"
    monkeypatch.setenv("LAMINA_CACHE", str(cache))
    return cache


@pytest.fixture
def corpora(tmp_path):
    """Two corpora without a letter in common, one three times as long."""
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("abc abd acd\n" * 2000)
    second.write_text("xyz xyw\n" * 600)
    return str(first), str(second)
