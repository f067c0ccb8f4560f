"""The two ways to reach a tensor of a forward pass: ``watch`` looks at it, ``intercept`` puts another in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from lamina.modeling.hooks import temporary_hooks
from lamina.probes.structure.outputs import Args, Kwargs, Output, argument_of, refill, stream_of, with_argument
from lamina.probes.structure.sites import Point

Key = TypeVar("Key", bound=Hashable)


@contextmanager
def watch(points: Mapping[Key, Point], see: Callable[[Key, torch.Tensor], None], *, root: nn.Module) -> Iterator[None]:
    """Call ``see(key, tensor)`` for each point, whenever a forward pass of ``root`` reaches it.

    The tensor is multiplied by the point's factor where it has one.
    """

    def look(key: Key, tensor: torch.Tensor) -> None:
        factor = points[key].factor
        see(key, tensor if factor is None else tensor * factor)

    with intercept(points, look, roots=[root]):
        yield


@contextmanager
def intercept(
    points: Mapping[Key, Point],
    change: Callable[[Key, torch.Tensor], torch.Tensor | None],
    *,
    roots: Sequence[nn.Module] = (),
    calls: Mapping[nn.Module, int] | None = None,
) -> Iterator[None]:
    """Replace the tensor at each point by ``change(key, tensor)`` while the model runs.

    A point names one call of its module. Calls are counted anew in each forward pass of one of the ``roots`` (the
    model, or its base); ``calls`` are those made before, if a layer runs alone. Factors are left out:
    the tensor is the model's own. If ``change`` returns None, the tensor stays.
    """
    done: Counter[nn.Module] = Counter(calls or {})
    by_module: dict[nn.Module, list[tuple[Key, Point]]] = {}
    for key, point in points.items():
        by_module.setdefault(point.module, []).append((key, point))

    def restart(module: nn.Module, args: Args) -> None:
        done.clear()

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        changed = False
        for key, point in by_module[module]:
            if point.side == "input" and point.call == done[module]:
                tensor = change(key, argument_of(args, kwargs, point.argument))
                if tensor is not None:
                    args, kwargs = with_argument(args, kwargs, point.argument, tensor)
                    changed = True
        return (args, kwargs) if changed else None

    def after(module: nn.Module, args: Args, output: Output) -> Output:
        for key, point in by_module[module]:
            if point.side == "output" and point.call == done[module]:
                tensor = change(key, stream_of(output))
                if tensor is not None:
                    output = refill(output)(tensor)
        done[module] += 1
        return output

    with temporary_hooks() as hooks:
        hooks += [root.register_forward_pre_hook(restart) for root in roots]
        for module in by_module:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
        yield
