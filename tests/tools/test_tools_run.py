"""Every tool runs as its docstring says: as a module, from the repository's root."""

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
MODULES = sorted(f"tools.{path.parent.name}.{path.stem}" for path in TOOLS.glob("*/*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_tool_finds_what_it_imports(name):
    assert importlib.import_module(name).__doc__
