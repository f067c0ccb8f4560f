from pathlib import Path

import pytest
from synthetic_study import write_study


@pytest.fixture
def study(tmp_path) -> Path:
    return write_study(tmp_path / "study", num_layers=8, logged=4)


@pytest.fixture
def grid(tmp_path) -> Path:
    """Three learning rates and two seeds."""
    return write_study(tmp_path / "grid", rates=(1e-3, 3e-3, 1e-2), seeds=(0, 1), num_layers=6, logged=3)
