from pathlib import Path

import pytest
from synthetic_study import write_study


@pytest.fixture
def study(tmp_path) -> Path:
    return write_study(tmp_path / "study", num_layers=8, logged=4)
