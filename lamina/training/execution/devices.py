"""The device that a run trains on."""

from __future__ import annotations

import torch

from lamina.errors import UserError


def device_of(device: str) -> str:
    """cpu, cuda or mps. Raises UserError for a device that this machine does not have."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.insert(0, "cuda")
    if torch.backends.mps.is_available():
        devices.insert(0, "mps")
    if device == "auto":
        return devices[0]
    if device not in devices:
        raise UserError(f"device: {device!r} is not on this machine (allowed here: auto, {', '.join(sorted(devices))})")
    return device
