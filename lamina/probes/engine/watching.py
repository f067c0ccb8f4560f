"""Looking at tensors of a forward pass while they pass by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina.probes.structure.discovery import Point
from lamina.probes.structure.tracing import first_tensor


@contextmanager
def watch(points: Mapping[Any, Point], see: Callable[[Any, torch.Tensor], None], *, root: nn.Module) -> Iterator[None]:
    """Call ``see(key, tensor)`` for each point, each time that a forward pass of ``root`` comes by it.

    Calls of a module are counted from the start of each forward pass of ``root``, the module that is run.
    """
    wanted: dict[int, tuple[nn.Module, dict[str, dict[int, list[tuple[Any, Point]]]]]] = {}
    for key, point in points.items():
        sides = wanted.setdefault(id(point.module), (point.module, {"input": {}, "output": {}}))[1]
        sides[point.side].setdefault(point.call, []).append((key, point))
    counts = dict.fromkeys(wanted, -1)
    handles = [root.register_forward_pre_hook(lambda module, args: counts.update(dict.fromkeys(counts, -1)))]

    def listen(module: nn.Module, sides: dict[str, dict[int, list[tuple[Any, Point]]]]) -> None:
        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            counts[id(module)] += 1
            for key, point in sides["input"].get(counts[id(module)], ()):
                argument = point.argument
                found = args[argument] if isinstance(argument, int) else kwargs[argument]
                see(key, found if point.factor is None else found * point.factor)

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            for key, point in sides["output"].get(counts[id(module)], ()):
                found = first_tensor(output)
                assert found is not None
                see(key, found if point.factor is None else found * point.factor)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if sides["output"]:
            handles.append(module.register_forward_hook(after))

    for module, sides in wanted.values():
        listen(module, sides)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
