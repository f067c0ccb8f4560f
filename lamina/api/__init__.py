"""The commands as functions: train or measure, then write the page, as the command line does.

Each takes a command's settings by name, and has them all in its signature. Nothing is loaded before it is used.
"""

from __future__ import annotations

from importlib import import_module

HOME = {
    "comparing": ("compare",),
    "judging": ("study",),
    "limits": ("max_lr",),
    "widths": ("coord_check", "transfer"),
    "runs": ("pretrain", "preflight"),
    "stages": ("sft", "reward", "rlhf", "dpo"),
    "measuring": ("evaluate", "probe_folder"),
    "models": ("backbones", "convert", "diagnose", "generate", "report"),
    "results": ("Comparison", "Diagnosis", "RunResult", "StudyOutcome"),
}
"""Which module of this package has which public names."""

__all__ = [
    "Comparison",
    "Diagnosis",
    "RunResult",
    "StudyOutcome",
    "backbones",
    "compare",
    "convert",
    "coord_check",
    "diagnose",
    "dpo",
    "evaluate",
    "generate",
    "max_lr",
    "preflight",
    "pretrain",
    "probe_folder",
    "report",
    "reward",
    "rlhf",
    "sft",
    "study",
    "transfer",
]


def __getattr__(name: str) -> object:
    for module, names in HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
