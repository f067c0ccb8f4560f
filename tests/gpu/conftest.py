import pytest
import torch
from training import tiny_runs

corpus, session_cache, shared_cache = tiny_runs.corpus, tiny_runs.session_cache, tiny_runs.shared_cache


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no GPU that torch sees (make test-gpu shows it one)"))
