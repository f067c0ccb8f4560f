"""A watch on the parent process, so that no trial outlives its study."""

from __future__ import annotations

import os

_parent: int | None = None


def watch(parent: int | None) -> None:
    """Count this process as orphaned once its parent is no longer ``parent`` (-1: at once, None: never)."""
    global _parent
    _parent = parent


def orphaned() -> bool:
    """Whether the watched parent has ended; False if none is watched."""
    return _parent is not None and os.getppid() != _parent
