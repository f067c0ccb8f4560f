"""Arithmetic that tells whether a model fits into free memory before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from lamina.errors import UserError

_CGROUP = Path("/sys/fs/cgroup")  # a container's own limit


def available(device: str = "cpu") -> int:
    """Return the bytes that can still be allocated on the GPU, or on the machine with swap and a container's limit."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such limit
        return free
    return min(free, limit - used + int(stat.get("inactive_file", 0)))


def refuse_beyond_memory(fields: str, what: str, needed: float, device: str = "cpu") -> None:
    """Raise UserError, naming the fields, if fewer than ``needed`` bytes are free."""
    if needed <= (free := available(device)):
        return
    owner = "the GPU" if device == "cuda" else "this machine"
    raise UserError(
        f"{fields}: {what} at least {needed / 2**30:,.1f} GiB of memory, and {owner} has {free / 2**30:,.1f} GiB free "
        "(allowed: lower values)"
    )


def fewest_weights(config: PreTrainedConfig) -> int:
    """Return a lower bound of a backbone's weights: one square matrix per block, and the embedding."""
    width = config.hidden_size
    return config.num_hidden_layers * width * width + getattr(config, "vocab_size", 0) * width
