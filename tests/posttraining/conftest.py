import pytest
from posttraining.tiny import write_model

pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a tiny model."""
    return write_model(tmp_path_factory.mktemp("base") / "model")
