"""The residual stream inside torch.compile, by an operation that stays in the graph.

The compiler inlines the hooks of the modules inside a compiled module. So a hook that calls ``lamina::see`` puts that
call into the graph, which then calls Python with the tensor at every pass. The graph is the same at every step, whether
the step is recorded or not. The call gets the location's name as a tensor on the module, not as a constant, so that
layers compiled one by one still share a graph.

When the compiler chooses among its graphs, it checks the modules' classes and not their hooks. So a module with
such hooks gets a separate class, an unchanged subclass, so that graphs made for other modules do not fit it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lamina.probes.structure.hooks import Args, Key, Kwargs, Output, argument_of, first_tensor
from lamina.probes.structure.sites import Point

_INPUT, _OUTPUT, _ARGUMENT = "_lamina_input", "_lamina_output", "_lamina_argument"
_SEEING: dict[int, Callable[[torch.Tensor], None]] = {}  # by a place's number, while a pass is measured
_NUMBERS = itertools.count()
_LIBRARY = torch.library.Library("lamina", "DEF")
# The mutation is only declared: the compiler drops calls that neither return nor write anything.
_LIBRARY.define("see(Tensor tensor, Tensor(a!) place) -> ()")


def call_seer(tensor: torch.Tensor, place: torch.Tensor) -> None:
    if _SEEING and (see := _SEEING.get(int(place))) is not None:
        see(tensor)


_LIBRARY.impl("see", call_seer, "CompositeExplicitAutograd")
torch.library.register_fake("lamina::see", lambda tensor, place: None, lib=_LIBRARY)


def hook(act: Callable[..., Output], *, traced: bool) -> Callable[..., Output]:
    """Return a hook for a module that may be compiled.

    The hooks of a compiled module itself run outside of its graph: there ``act`` runs uncompiled. Inside a graph, the
    hook is inlined: ``act`` becomes a part of the graph if it is ``traced``, and otherwise does nothing.
    """
    uncompiled: Callable[..., Output] = torch.compiler.disable(act)

    def acting(*args: Output) -> Output:
        if not torch.compiler.is_compiling():
            return uncompiled(*args)
        return act(*args) if traced else None

    skip_code(acting.__code__)  # else it is compiled on its own, where is_compiling() holds
    return acting


def _show(value: Output, place: torch.Tensor) -> None:
    tensor = first_tensor(value)
    if tensor is not None and not isinstance(tensor, DTensor):
        torch.ops.lamina.see(tensor.detach(), place)


def show_input(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    _show(argument_of(args, kwargs, getattr(module, _ARGUMENT)), getattr(module, _INPUT))


def show_output(module: nn.Module, args: Args, output: Output) -> None:
    _show(output, getattr(module, _OUTPUT))


_SHOW_INPUT, _SHOW_OUTPUT = hook(show_input, traced=True), hook(show_output, traced=True)


@functools.cache
def class_with_hooks(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that tells the compiler apart modules with hooks."""
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def is_compiled(model: nn.Module) -> bool:
    """Return whether a part of the model is compiled, or the call that is under way comes from a compiled wrapper.

    Some hand the watched model over without its wrapper, as Trainer does.
    """
    for module in model.modules():
        forward = getattr(module, "forward", None)
        if module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            return True
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), OptimizedModule):
            return True
        frame = frame.f_back
    return False


class GraphHooks(Generic[Key]):
    """Hooks at points of a model that a compiler may inline; they stay until ``close``."""

    def __init__(self, points: Mapping[Key, Point]):
        self._handles: list[RemovableHandle] = []
        self._places: dict[int, list[tuple[Key, Point]]] = {}
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        groups: dict[tuple[nn.Module, str], list[tuple[Key, Point]]] = {}
        for key, point in points.items():
            module = getattr(point.module, "_orig_mod", point.module)
            groups.setdefault((module, point.side), []).append((key, point))
        for (module, side), group in groups.items():
            number = next(_NUMBERS)
            self._places[number] = group
            if module not in self._classes:
                self._classes[module] = type(module)
                module.__class__ = class_with_hooks(type(module))
            setattr(module, _INPUT if side == "input" else _OUTPUT, torch.tensor(number))
            if side == "input":
                setattr(module, _ARGUMENT, group[0][1].argument)
                self._handles.append(module.register_forward_pre_hook(_SHOW_INPUT, with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(_SHOW_OUTPUT))

    @contextmanager
    def observing(self, see: Callable[[Key, torch.Tensor], None]) -> Iterator[None]:
        """Call ``see(key, tensor)`` for each point that a pass in this context reaches; times the point's factor."""
        calls: Counter[int] = Counter()

        def look(number: int, tensor: torch.Tensor) -> None:
            for key, point in self._places[number]:
                if point.call == calls[number]:
                    see(key, tensor if point.factor is None else tensor * point.factor)
            calls[number] += 1

        _SEEING.update({number: functools.partial(look, number) for number in self._places})
        try:
            yield
        finally:
            for number in self._places:
                _SEEING.pop(number, None)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for module, cls in self._classes.items():
            module.__class__ = cls
            for name in (_INPUT, _OUTPUT, _ARGUMENT):
                vars(module).pop(name, None)
