"""The device that a run trains on."""

from __future__ import annotations

import torch

from lamina.errors import UserError


def device_of(device: str) -> str:
    """cpu, cuda or mps. Raises UserError for one that is asked for and not there."""
    there = ["cpu"]
    if torch.cuda.is_available():
        there.insert(0, "cuda")
    if torch.backends.mps.is_available():
        there.insert(0, "mps")
    if device == "auto":
        return there[0]
    if device not in there:
        raise UserError(f"device: {device!r} is not on this machine (allowed here: auto, {', '.join(sorted(there))})")
    return device
