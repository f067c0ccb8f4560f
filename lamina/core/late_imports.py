"""Run a callback after the import of another package, so that ``import lamina`` itself imports no other package."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple


class _Finder(NamedTuple):
    module: str
    then: Callable[[ModuleType], None]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(module: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module after the module's import, or at once if the module is already imported."""
    finder = _Finder(module, then)
    if (imported := sys.modules.get(module)) is not None:
        then(imported)
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
