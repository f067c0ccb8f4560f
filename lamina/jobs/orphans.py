"""Whether the process that started this one is gone: a trial must not outlive its study."""

from __future__ import annotations

import os

_parent: int | None = None


def watch(parent: int | None) -> None:
    """From now on this process counts as orphaned once its parent is not ``parent`` (-1: at once, None: never)."""
    global _parent
    _parent = parent


def orphaned() -> bool:
    """Whether the parent that is watched has ended; a process that watches none never is."""
    return _parent is not None and os.getppid() != _parent
