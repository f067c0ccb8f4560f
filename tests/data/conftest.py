import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache."""
    cache = tmp_path / "lamina-cache"
    monkeypatch.setenv("LAMINA_CACHE", str(cache))
    return cache
