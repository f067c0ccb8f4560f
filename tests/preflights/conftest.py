import pytest
from training.tiny_runs import corpus  # noqa: F401

from lamina.data.packed import prepare_blocks


@pytest.fixture(scope="session")
def blocks(corpus, tmp_path_factory):  # noqa: F811
    made, _ = prepare_blocks(str(corpus), "bytes", 16, cache_dir=tmp_path_factory.mktemp("blocks"), progress=False)
    return made
