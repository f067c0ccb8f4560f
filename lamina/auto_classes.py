"""After the import of lamina and transformers (in any order), transformers' Auto classes load saved Lamina models.

Registering a configuration class would load torch, so Lamina gives transformers a lazy mapping instead. When you first
load a "lamina" model, this mapping imports ``lamina.modeling``, which registers the classes.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class _Configurations(dict):
    """A copy of transformers' table of configurations. A look-up of "lamina" imports Lamina's models."""

    def __contains__(self, key: object) -> bool:
        if key == "lamina" and not super().__contains__(key):
            importlib.import_module("lamina.modeling")
        return super().__contains__(key)


def install(module: ModuleType) -> None:
    registered = getattr(getattr(module, "CONFIG_MAPPING", None), "_extra_content", None)
    if type(registered) is dict:  # another version of transformers may keep it elsewhere: then nothing is changed
        module.CONFIG_MAPPING._extra_content = _Configurations(registered)  # type: ignore[attr-defined]
