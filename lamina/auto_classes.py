"""Let transformers' Auto classes load saved Lamina models, in whatever order you import lamina and transformers.

The classes of Lamina's models need torch, so Lamina does not register the classes at import. Lamina gives
transformers a lazy mapping, which registers the classes when you first load a model of type "lamina".
"""

from __future__ import annotations

import importlib
from types import ModuleType


class _Configurations(dict):
    """transformers' configuration classes by model type. A look-up of "lamina" imports Lamina's models."""

    def __contains__(self, key: object) -> bool:
        if key == "lamina" and not super().__contains__(key):
            importlib.import_module("lamina.modeling")
        return super().__contains__(key)


def install(module: ModuleType) -> None:
    registered = getattr(getattr(module, "CONFIG_MAPPING", None), "_extra_content", None)
    if type(registered) is dict:  # another version of transformers may keep it elsewhere: then nothing is changed
        module.CONFIG_MAPPING._extra_content = _Configurations(registered)  # type: ignore[attr-defined]
