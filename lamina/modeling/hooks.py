"""Hooks that are gone afterwards, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def temporary_hooks() -> Iterator[list[RemovableHandle]]:
    """A list for the handles of hooks: those in it at the end are removed, also after an error.

    >>> with temporary_hooks() as hooks:
    ...     hooks.append(module.register_forward_hook(look))
    ...     module(x)
    """
    hooks: list[RemovableHandle] = []
    try:
        yield hooks
    finally:
        for hook in hooks:
            hook.remove()
