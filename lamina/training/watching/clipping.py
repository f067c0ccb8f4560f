"""Gradients before torch's functions clip them: these tell who asks before they change a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.utils import clip_grad as torch_clipping

# Every way to clip by norm (torch's, accelerate's, Trainer's) ends in the first; a caller may hold the others by name.
_INNER = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")


_LISTENERS: list[Callable[[], None]] = []
_PATCHED = ExitStack()  # while there are listeners


@contextmanager
def before_clipping(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` before torch clips any gradient by norm or by value; the clipping itself is torch's own.

    Several may listen, and leave in any order; torch's functions are its own again once the last has left.
    """
    if not _LISTENERS:
        for holder in (torch_clipping, torch.nn.utils):
            for name in _INNER:
                if callable(inner := getattr(holder, name, None)):
                    _PATCHED.callback(setattr, holder, name, inner)
                    setattr(holder, name, _telling(inner))
    _LISTENERS.append(tell)
    try:
        yield
    finally:
        _LISTENERS.remove(tell)
        if not _LISTENERS:
            _PATCHED.close()


def _telling(inner: Callable[..., object]) -> Callable[..., object]:
    def clip(*args: object, **kwargs: object) -> object:
        for tell in tuple(_LISTENERS):
            tell()
        return inner(*args, **kwargs)

    return clip
