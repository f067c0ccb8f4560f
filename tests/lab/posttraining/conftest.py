import pytest
from lab.posttraining.tiny import preferences, write_model, write_rows

pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a tiny model that takes the longest sequences of the recipes."""
    return write_model(tmp_path_factory.mktemp("base") / "model", positions=512)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", preferences(24))
