"""Watch the residual stream inside torch.compile, with an operation that stays in the graph.

The compiler inlines the hooks of modules inside a compiled module. Lamina's hooks call the operation ``lamina::see``,
which passes the tensor to Python. The call is part of every pass, so the graph is the same at all steps. The compiler
chooses graphs by the modules' classes, so modules with hooks get a subclass.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, SupportsIndex

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lamina.core.json_types import Json
from lamina.probes.structure.hooks import Args, Key, Kwargs, Output, argument_of, first_tensor
from lamina.probes.structure.sites import Point

_INPUT, _OUTPUT, _ARGUMENT = "_lamina_input", "_lamina_output", "_lamina_argument"
_SEEING: dict[int, Callable[[torch.Tensor], None]] = {}  # by a point's number, while Lamina measures a pass
_NUMBERS = itertools.count()
_LIBRARY = torch.library.Library("lamina", "DEF")
# The declared mutation writes nothing. Without it, the compiler would drop the call, which returns nothing.
_LIBRARY.define("see(Tensor tensor, Tensor(a!) place) -> ()")


def call_seer(tensor: torch.Tensor, place: torch.Tensor) -> None:
    if _SEEING and (see := _SEEING.get(int(place))) is not None:
        see(tensor)


_LIBRARY.impl("see", call_seer, "CompositeExplicitAutograd")
torch.library.register_fake("lamina::see", lambda tensor, place: None, lib=_LIBRARY)


class Hook:
    """A hook that calls a method, for a module that may be compiled. The hook does not keep the method's object alive.

    On the compiled module itself, the hook calls the method outside the graph. On modules inside a compiled module, the
    hook does nothing. Copies of the hook do nothing.
    """

    def __init__(self, method: Callable[..., Output] | None = None):
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Output) -> Output:
        if torch.compiler.is_compiling() or self._method is None:
            return None
        return _uncompiled(self._method, *args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


@torch.compiler.disable
def _uncompiled(method: weakref.WeakMethod[Callable[..., Output]], *args: Output) -> Output:
    act = method()
    return None if act is None else act(*args)


skip_code(Hook.__call__.__code__)  # else torch compiles this call separately, and is_compiling() is true


def _traced(act: Callable[..., Output]) -> Callable[..., Output]:
    """Return a hook that works on a compiled module and on the modules inside it."""
    uncompiled: Callable[..., Output] = torch.compiler.disable(act)

    def acting(*args: Output) -> Output:
        return act(*args) if torch.compiler.is_compiling() else uncompiled(*args)

    skip_code(acting.__code__)
    return acting


def _show(value: Output, place: torch.Tensor) -> None:
    tensor = first_tensor(value)
    if tensor is not None and not isinstance(tensor, DTensor):
        torch.ops.lamina.see(tensor.detach(), place)


def show_input(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    _show(argument_of(args, kwargs, getattr(module, _ARGUMENT)), getattr(module, _INPUT))


def show_output(module: nn.Module, args: Args, output: Output) -> None:
    _show(output, getattr(module, _OUTPUT))


_SHOW_INPUT, _SHOW_OUTPUT = _traced(show_input), _traced(show_output)


@functools.cache
def class_with_hooks(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass for modules with hooks. Copies of a module with hooks have the original class."""

    def __reduce_ex__(self: nn.Module, protocol: SupportsIndex) -> tuple[object, ...]:
        reduced: Any = cls.__reduce_ex__(self, protocol)
        make, args, state, *rest = reduced
        args = tuple(cls if type(self) is arg else arg for arg in args)
        make = cls.__new__ if make.__name__ == "__newobj__" else make  # pickle wants the object's class there
        return make, args, _without_hooks(state) if isinstance(state, dict) else state, *rest

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": __reduce_ex__}
    return type(cls.__name__, (cls,), names)


def _without_hooks(state: Json) -> Json:
    state = {name: value for name, value in state.items() if name not in (_INPUT, _OUTPUT, _ARGUMENT)}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = state[name]
        ours = {number for number, hook in hooks.items() if hook in (_SHOW_INPUT, _SHOW_OUTPUT)}
        for kind in (name, f"{name}_with_kwargs"):  # another process may use the number again
            state[kind] = OrderedDict((number, value) for number, value in state[kind].items() if number not in ours)
    return state


def is_compiled(model: nn.Module) -> bool:
    """Return whether a part of the model is compiled, or a compiled wrapper is calling the model now."""
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
    """Hooks at points of a model that may be compiled. The hooks stay until ``close``."""

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
        """Inside the context, call ``see(key, tensor)`` at each point that a forward pass reaches."""
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
        for handle in self._handles:
            handle.remove()
        for module, cls in self._classes.items():
            module.__class__ = cls
            for name in (_INPUT, _OUTPUT, _ARGUMENT):
                vars(module).pop(name, None)
