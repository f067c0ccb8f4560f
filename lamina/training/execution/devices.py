"""Look up a GPU's peak speed, and replace "auto" in the settings for precision and compilation."""

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

# dense bf16 FLOP/s from data sheets, for the first row whose words are all in the GPU's name
_PEAKS: tuple[tuple[str, float], ...] = (
    ("gb200", 2.5e15),
    ("b300", 2.25e15),
    ("b200", 2.25e15),
    ("h200 nvl", 836e12),
    ("h200", 989e12),
    ("h100 nvl", 835e12),
    ("h100 pcie", 756e12),
    ("h100", 989e12),
    ("h800 pcie", 756e12),
    ("h800", 989e12),
    ("a100", 312e12),
    ("a800", 312e12),
    ("a40", 149.7e12),
    ("a30", 165e12),
    ("l40s", 362e12),
    ("l4", 121e12),
    ("mi355x", 2.5e15),
    ("mi325x", 1.3074e15),
    ("mi300x", 1.3074e15),
    ("mi250x", 383e12),
    ("5090", 209.5e12),
    ("4090", 165.2e12),
    ("3090", 71e12),
)


def peak_flops(card: str) -> float | None:
    """Return a GPU's dense bf16 FLOP/s by its name. None means unknown, as for laptop GPUs and MIG partitions."""
    words = set(card.lower().replace("-", " ").split())
    if words & {"laptop", "mig"}:
        return None
    return next((peak for names, peak in _PEAKS if set(names.split()) <= words), None)


def peak_of(device: str) -> float | None:
    """Return the dense bf16 FLOP/s of this process's GPU, or None for a CPU or an unknown GPU."""
    return peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None


def decided(settings: S) -> S:
    """Replace "auto" in the settings for precision and compilation: bf16 on a GPU that supports it, or else fp32."""
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
    """Return why torch.compile does not work on this machine, or None if it works."""
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
