"""Scripts of docs, examples and benchmarks as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def loaded(script: str) -> ModuleType:
    """The module of a script, by its path in the repository."""
    path = ROOT / script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    before = list(sys.path)
    sys.path.append(str(path.parent))  # scripts of a folder import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before  # what a script puts in front would hide packages of the tests
    return module
