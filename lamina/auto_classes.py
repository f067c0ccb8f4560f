"""Saved Lamina models load through transformers' Auto classes once both packages are imported, in either order.

Registering a configuration takes its class, and that takes torch. So all that is left with transformers is a table that
imports ``lamina.modeling``, which registers everything, the first time that somebody asks for a "lamina" model.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "transformers.models.auto.configuration_auto"


class _Configurations(dict):
    """transformers' table of the configurations that others have registered."""

    def __contains__(self, key: object) -> bool:
        if key == "lamina" and not super().__contains__(key):
            importlib.import_module("lamina.modeling")
        return super().__contains__(key)


class _Finder:
    """Sees transformers' table being imported, and puts ours in its place; finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(module: ModuleType) -> None:
    registered = getattr(getattr(module, "CONFIG_MAPPING", None), "_extra_content", None)
    if type(registered) is dict:  # another version of transformers may keep it elsewhere: then nothing is changed
        module.CONFIG_MAPPING._extra_content = _Configurations(registered)  # type: ignore[attr-defined]


def register() -> None:
    """Do it now where transformers' Auto classes are imported, else when they are."""
    if (module := sys.modules.get(_MODULE)) is not None:
        _install(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
