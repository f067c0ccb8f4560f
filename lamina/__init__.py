"""Lamina: choose, train and diagnose where the norms sit in a Transformer.

Importing this package loads neither torch nor transformers; the functions do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lamina import auto_classes
from lamina.core import peft_targets

if TYPE_CHECKING:
    from lamina import data, evaluation, modeling, placements, preflights, probes, reports, studies, training  # noqa: F401
    from lamina.api import compare, evaluate, max_lr, preflight, pretrain, study
    from lamina.modeling.building import build, wire
    from lamina.probes.engine.measure import probe
    from lamina.training.watching.callback import LayerMonitor
    from lamina.training.watching.loop import watch

__version__ = "0.1.0"
__all__ = [
    "LayerMonitor",
    "__version__",
    "build",
    "compare",
    "evaluate",
    "max_lr",
    "placements",
    "preflight",
    "pretrain",
    "probe",
    "study",
    "watch",
    "wire",
]

_LAZY = {
    "build": "lamina.modeling.building",
    "wire": "lamina.modeling.building",
    "compare": "lamina.api",
    "evaluate": "lamina.api",
    "max_lr": "lamina.api",
    "preflight": "lamina.api",
    "pretrain": "lamina.api",
    "study": "lamina.api",
    "probe": "lamina.probes.engine.measure",
    "LayerMonitor": "lamina.training.watching.callback",
    "watch": "lamina.training.watching.loop",
}
_PACKAGES = ("placements", "modeling", "data", "probes", "training", "evaluation", "preflights", "studies", "reports")


if not TYPE_CHECKING:  # else a misspelt name would be of type Any

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        if name in _PACKAGES:
            return importlib.import_module(f"lamina.{name}")
        raise AttributeError(f"module 'lamina' has no attribute {name!r}")


auto_classes.register()
peft_targets.register()
