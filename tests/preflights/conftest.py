import pytest
from training.tiny_runs import write_corpus

from lamina.data.packed import prepare_blocks


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def blocks(corpus, tmp_path_factory):
    made, _ = prepare_blocks(str(corpus), "bytes", 16, cache_dir=tmp_path_factory.mktemp("blocks"), progress=False)
    return made
