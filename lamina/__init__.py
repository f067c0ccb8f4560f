"""Lamina: choose where the norms sit in a Transformer, train it, and see what each layer does.

``import lamina`` loads neither torch nor transformers. Lamina's functions load them when you call a function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lamina import auto_classes
from lamina.api import WRITTEN
from lamina.catalog import JOBS
from lamina.core import peft_targets
from lamina.core.extras import missing_extra
from lamina.core.late_imports import when_imported
from lamina.core.terminal import escape_logs

if TYPE_CHECKING:
    from lamina import (  # noqa: F401
        api,
        data,
        evaluation,
        modeling,
        placements,
        preflights,
        probes,
        reports,
        studies,
        training,
    )
    from lamina.api import *  # noqa: F403
    from lamina.modeling.building import build, wire
    from lamina.probes.engine.measure import probe
    from lamina.training.monitor.callbacks import LayerMonitor
    from lamina.training.monitor.check import check
    from lamina.training.monitor.guard import Diverged
    from lamina.training.monitor.lightning import LightningMonitor  # noqa: F401
    from lamina.training.monitor.watch import watch

    eval = api.evaluate

__version__ = "0.1.0"
_FUNCTIONS = sorted({*(row.function_name for row in JOBS.values()), *WRITTEN})

__all__ = ["Diverged", "LayerMonitor", "__version__", "build", "check", "eval", "placements", "probe", "watch", "wire"]
__all__ += _FUNCTIONS

_ELSEWHERE = {
    "build": "lamina.modeling.building",
    "wire": "lamina.modeling.building",
    "probe": "lamina.probes.engine.measure",
    "LayerMonitor": "lamina.training.monitor.callbacks",
    "LightningMonitor": "lamina.training.monitor.lightning",  # not in __all__: it needs lightning
    "check": "lamina.training.monitor.check",
    "Diverged": "lamina.training.monitor.guard",
    "watch": "lamina.training.monitor.watch",
}
_PACKAGES = (
    *("api", "placements", "modeling", "data", "probes", "training", "evaluation", "preflights", "studies", "reports"),
    "lab",
)


if not TYPE_CHECKING:  # else a misspelled name would be of type Any

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"lamina.{name}")
        if name in __all__ or name in _ELSEWHERE:
            try:
                home = importlib.import_module(_ELSEWHERE.get(name, "lamina.api"))
            except ModuleNotFoundError as error:
                raise missing_extra(f"lamina.{name}", error) or error from None
            return getattr(home, "evaluate" if name == "eval" else name)
        raise AttributeError(f"module 'lamina' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


when_imported("transformers.models.auto.configuration_auto", auto_classes.install)
when_imported("peft.utils.constants", peft_targets.put_rows)
escape_logs("lamina")
