"""Read or replace a tensor inside a forward pass, with ``observe`` or ``intercept``."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.modeling.parts import patched, temporary_hooks, uncompiled
from lamina.probes.structure.sites import LayerSite, Point, Structure

Output: TypeAlias = Any  # a module's output: a tensor, a tuple, a list or a ModelOutput
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)


def first_tensor(output: Output) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def stream_of(output: Output) -> torch.Tensor:
    tensor = first_tensor(output)
    assert tensor is not None
    return tensor


def refill(output: Output) -> Callable[[torch.Tensor], Output]:
    """Return a function that rebuilds a module's output with a new first tensor."""
    if isinstance(output, torch.Tensor):
        return lambda tensor: tensor
    named = isinstance(output, Mapping)
    keys = list(output) if named else []
    values = [output[key] for key in keys] if named else list(output)
    position = next(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
    values[position] = None  # so that ``make`` does not keep the original tensor in memory
    kind = type(output)

    def make(tensor: torch.Tensor) -> Output:
        refilled = [*values[:position], tensor, *values[position + 1 :]]
        if named:
            return kind(**dict(zip(keys, refilled, strict=True)))
        return kind(*refilled) if hasattr(kind, "_fields") else kind(refilled)

    return make


def argument_of(args: Args, kwargs: Kwargs, place: int | str) -> torch.Tensor:
    return args[place] if isinstance(place, int) else kwargs[place]


def with_argument(args: Args, kwargs: Kwargs, place: int | str, value: torch.Tensor) -> tuple[Args, Kwargs]:
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, place: value}


@contextmanager
def observe(
    points: Mapping[Key, Point], see: Callable[[Key, torch.Tensor], None], *, root: nn.Module
) -> Iterator[None]:
    """Call ``see(key, tensor)`` at each point of a forward pass of ``root``, with the point's factor applied."""

    def look(key: Key, tensor: torch.Tensor) -> None:
        factor = points[key].factor
        tensor = stream_of(tensor)
        if points[key].collapse and tensor.ndim > 3:
            tensor = tensor.mean(-2)
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
    """Replace the tensor at each point with ``change(key, tensor)`` in forward passes.

    Args:
        points: the tensors to replace, by key. Lamina does not apply a point's factor.
        change: a function that returns the new tensor, or None to keep the tensor
        roots: the modules whose forward pass resets the counts of calls to 0
        calls: each module's number of earlier calls, for a pass through a single layer
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


@contextmanager
def layers_running(layers: Sequence[LayerSite]) -> Iterator[list[int]]:
    """Yield a list that always holds the indices of the running layers, innermost last."""
    sites: dict[nn.Module, list[int]] = {}
    for site in layers:
        sites.setdefault(site.module, []).append(site.index)
    calls: Counter[nn.Module] = Counter()
    inside: list[int] = []

    def enter(module: nn.Module, args: Args) -> None:
        inside.append(sites[module][calls[module] % len(sites[module])])
        calls[module] += 1

    def leave(module: nn.Module, args: Args, output: Output) -> None:
        if inside:
            inside.pop()

    with temporary_hooks() as hooks:
        hooks += [module.register_forward_pre_hook(enter) for module in sites]
        hooks += [module.register_forward_hook(leave) for module in sites]
        yield inside


def forward(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Output:
    """Run the model on a batch, without a key-value cache."""
    more = {"use_cache": False} if takes_cache(type(model)) else {}
    return model(**inputs, **more)


@contextmanager
def forwards(functions: Mapping[nn.Module, Callable[..., Output]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, function in functions.items():
            stack.enter_context(patched(module, forward=function))
        yield


def takes_cache(cls: type[nn.Module]) -> bool:
    parameters = inspect.signature(cls.forward).parameters
    # Some models accept use_cache in **kwargs, for an inner model that would otherwise keep a cache.
    return "use_cache" in parameters or ("past_key_values" in parameters)


def base_of(model: nn.Module, structure: Structure, inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the model without its head, or the whole model if the rest lacks a layer or does not accept all inputs."""
    base = getattr(model, "base_model", model)
    if not isinstance(base, nn.Module) or base is model:
        return model
    parts = {id(module) for module in base.modules()}
    takes = inspect.signature(type(base).forward).parameters
    whole = all(id(site.module) in parts for site in structure.layers)
    return base if whole and all(name in takes for name in inputs) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. At the end, restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Run eager attention, so that a probe can read the attention weights and differentiate twice."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    switch = getattr(model, "set_attn_implementation", None) if before not in (None, "eager") else None
    if switch is not None:
        switch("eager")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if switch is not None:
            switch(before)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled, in evaluation mode and without gradients. At the end, restore all states."""
    states = random.getstate(), np.random.get_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    rng = torch.random.fork_rng(devices=[d.index for d in devices])
    with rng, uncompiled(model), fresh_gradients(model.parameters()), evaluating(model):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def fresh_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Clear the parameters' gradients. At the end, restore the gradients and ``requires_grad``."""
    held = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
    for parameter, _, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient, required in held:
            parameter.grad = None
            parameter.requires_grad_(required)
            parameter.grad = gradient
