"""The commands as Python functions. Each function does the same as the command of this name, and writes the page.

The functions take the commands' settings as keyword arguments. Importing this module loads no heavy package.
"""

from __future__ import annotations

from importlib import import_module

from lamina.catalog import JOBS

WRITTEN = (
    "backbones",
    "convert",
    "diagnose",
    "emit",
    "generate",
    "graft",
    "placement_of",
    "prune",
    "report",
)  # functions for commands that are not jobs
_RESULTS = ("Comparison", "Diagnosis", "RunResult", "StudyOutcome")
__all__ = sorted([*(row.function_name for row in JOBS.values()), *WRITTEN, *_RESULTS])


def __getattr__(name: str) -> object:
    for row in JOBS.values():
        if row.function_name == name:
            from lamina.api.job_functions import function_of

            return function_of(row)
    if name in (*WRITTEN, *_RESULTS):
        return getattr(import_module(f"{__name__}.{'models' if name in WRITTEN else 'results'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
