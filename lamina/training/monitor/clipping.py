"""Gradients before torch's functions clip them: these tell who asks before they change a gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.utils import clip_grad as torch_clipping

# Every way to clip by norm (torch's, accelerate's, Trainer's) ends in the first; a caller may hold the others by name.
_INNER = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")


Tell = Callable[[Sequence[torch.Tensor], float | None], None]
"""Gets the parameters, and the norm to which their gradients are clipped; None for clipping by value."""
_LISTENERS: list[Tell] = []
_PATCHED = ExitStack()  # while there are listeners


@contextmanager
def before_clipping(tell: Tell) -> Iterator[None]:
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
    signature = inspect.signature(inner)

    def clip(*args: object, **kwargs: object) -> object:
        named = signature.bind(*args, **kwargs).arguments
        parameters, limit = named["parameters"], named.get("max_norm")
        named["parameters"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for tell in tuple(_LISTENERS):
            tell(named["parameters"], limit if isinstance(limit, float | int) else None)
        return inner(**named)

    return clip
