"""Gradients before clipping, whoever clips them: torch's functions tell who asks before they change a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import clip_grad as torch_clipping

# Every way to clip by norm (torch's, accelerate's, Trainer's) ends in the first; a caller may hold the others by name.
_INNER = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")


@contextmanager
def before_clipping(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` before torch clips any gradient by norm or by value; the clipping itself is torch's own."""
    replaced: list[tuple[object, str, object]] = []
    for holder in (torch_clipping, torch.nn.utils):
        for name in _INNER:
            if callable(inner := getattr(holder, name, None)):
                replaced.append((holder, name, inner))
                setattr(holder, name, _telling(tell, inner))
    try:
        yield
    finally:
        for holder, name, inner in replaced:
            setattr(holder, name, inner)


def _telling(tell: Callable[[], None], inner: Callable[..., object]) -> Callable[..., object]:
    def clip(*args: object, **kwargs: object) -> object:
        tell()
        return inner(*args, **kwargs)

    return clip
