"""Let transformers' Auto classes load saved Lamina models, in whatever order you import lamina and transformers.

Lamina's model classes need torch, so ``import lamina`` does not register these classes. Instead, transformers gets a
mapping that registers the classes when you first load a model of type "lamina".
"""

from __future__ import annotations

import importlib
from types import ModuleType


class _Configurations(dict):
    """A mapping of transformers' configuration classes by model type. A look-up of "lamina" imports Lamina's models."""

    def __contains__(self, key: object) -> bool:
        if key == "lamina" and not super().__contains__(key):
            importlib.import_module("lamina.modeling")
        return super().__contains__(key)


def install(module: ModuleType) -> None:
    registered = getattr(getattr(module, "CONFIG_MAPPING", None), "_extra_content", None)
    if type(registered) is dict:  # another version of transformers may have no such mapping
        module.CONFIG_MAPPING._extra_content = _Configurations(registered)  # type: ignore[attr-defined]
