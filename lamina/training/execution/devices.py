"""The device of a run, and its default precision and compilation (``auto``)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace
from typing import TypeVar

import torch

from lamina.modeling.processes import device_of
from lamina.training.setting_groups import COMPILED_FROM, SpeedSettings

S = TypeVar("S", bound=SpeedSettings)


def decided(settings: S) -> S:
    """Replace ``auto`` in precision and compilation by a rule, so that a run's numbers never depend on a stopwatch.

    On a GPU that computes in bfloat16: bf16, compiled from ``COMPILED_FROM`` steps on unless CUDA graphs are used.
    Elsewhere: fp32, not compiled.
    """
    device = device_of(getattr(settings, "device", "auto"))
    fast = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    changes: dict[str, str] = {}
    if settings.precision == "auto":
        changes["precision"] = "bf16" if fast else "fp32"
    if settings.compile == "auto" and "compile" not in settings.without:
        long = getattr(settings, "steps", 0) >= COMPILED_FROM and not settings.cuda_graphs
        changes["compile"] = "on" if fast and long and not missing_compiler(torch.device(device)) else "off"
    return replace(settings, **changes)


def missing_compiler(device: torch.device) -> str | None:
    """Return why nothing can be compiled for ``device`` here; None if it can."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        there = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        return None if there else "there is no C compiler, which triton needs"
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            compiler = get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler"
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler!r} is not found)"
    return f"not supported on {device.type!r}"
