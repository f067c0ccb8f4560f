"""Trace a small forward pass: its module calls, and its additions, scalings and copies of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.modeling.parts import temporary_hooks
from lamina.probes.structure.hooks import Args, Kwargs, Output, first_tensor
from lamina.probes.structure.sites import is_norm

aten = torch.ops.aten

_ADD = {aten.add.Tensor, aten.add_.Tensor}
_SCALE = {aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar}
_SAME = {
    *(aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default, aten.view.default),
    *(aten._unsafe_view.default, aten.reshape.default, aten.lift_fresh.default, aten.contiguous.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.native_dropout.default),
}
_PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.slice.Tensor, aten.chunk.default}
_ACTIVATIONS = {
    *("silu", "gelu", "relu", "relu_", "tanh", "sigmoid", "hardswish", "mish", "leaky_relu", "elu", "softplus"),
    *("silu_", "hardsigmoid", "relu6", "hardtanh"),
}


@dataclass(eq=False)
class Call:
    """One call of a module. Events and tensors have numbers in order of time."""

    module: nn.Module
    path: str
    number: int  # the number of this module's earlier calls
    parent: Call | None
    began: int  # the number of an event, like ``ended``
    inputs: dict[int | str, int]  # tensor numbers by position or keyword. ``output`` is a tensor number, too
    ended: int = -1
    output: int = -1
    children: list[Call] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def is_norm(self) -> bool:
        return is_norm(self.module)

    def within(self, other: Call) -> bool:
        """Return whether this call happened inside the other call, or is the same call."""
        return other.began <= self.began and self.ended <= other.ended


Factor: TypeAlias = torch.Tensor | float | None  # the factor of a branch (None: no factor)
Factors: TypeAlias = tuple[object, object] | None  # the factors by which a scaling multiplies its two operands


@dataclass(eq=False)
class Op:
    kind: str  # add | scale | same | parts | activation | attention | choice
    time: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: Call | None
    factor: Factors = None


@dataclass(eq=False)
class Trace:
    """The record of one forward pass: calls, operations and tensors, in order of time."""

    calls: list[Call] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)  # in memory, so that no two tensors have the same id()


class _Follower(TorchDispatchMode):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.trace, self.stack, self.clock = Trace(), [], itertools.count()
        wrapper = "_fsdp_wrapped_module."  # FSDP's wrapper has the inner module's attributes
        self.paths = {module: path.replace(wrapper, "") for path, module in model.named_modules()}
        self.values: dict[int, int] = {}
        self.times: dict[int, int] = {}

    def value(self, tensor: torch.Tensor, new: bool = False) -> int:
        """Return a tensor's number in the trace. ``new`` gives the tensor a new number."""
        if new or id(tensor) not in self.values:
            self.values[id(tensor)] = len(self.trace.shapes)
            self.trace.shapes.append(tuple(tensor.shape))
            self.trace.floating.append(tensor.is_floating_point())
            self.trace.tensors.append(tensor)
        return self.values[id(tensor)]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Output:
        kind = _kind(func, args)
        inputs = tuple(self.value(a) for a in args if isinstance(a, torch.Tensor)) if kind else ()
        result = func(*args, **(kwargs or {}))
        if kind:
            outputs = [r for r in (result if isinstance(result, tuple | list) else [result]) if torch.is_tensor(r)]
            factor = None
            if kind == "scale":
                factor = (args[1], args[0])  # the other operand is the factor
                if func in (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar):
                    factor = (1.0 / args[1], None)
            numbers = tuple(self.value(r, new=True) for r in outputs)
            call = self.stack[-1] if self.stack else None
            self.trace.ops.append(Op(kind, next(self.clock), inputs, numbers, call, factor))
        return result

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        number = self.times.get(id(module), 0)
        self.times[id(module)] = number + 1
        inputs = {key: self.value(a) for key, a in [*enumerate(args), *kwargs.items()] if isinstance(a, torch.Tensor)}
        parent = self.stack[-1] if self.stack else None
        call = Call(module, self.paths[module], number, parent, next(self.clock), inputs)
        if parent is not None:
            parent.children.append(call)
        self.trace.calls.append(call)
        self.stack.append(call)

    def leave(self, module: nn.Module, args: Args, output: Output) -> None:
        call = self.stack.pop()
        call.ended = next(self.clock)
        tensor = first_tensor(output)
        if tensor is not None:
            call.output = self.value(tensor)


def _kind(func: OpOverload, args: Args) -> str | None:
    if func in _ADD:
        return "add" if isinstance(args[1], torch.Tensor) else None
    if func in _SCALE:
        return "scale"
    if func in _SAME:
        return "same"
    if func in _PARTS:
        return "parts"
    name = func._schema.name.removeprefix("aten::")
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return "attention"
    if name in ("_softmax", "softmax", "_safe_softmax") and args[0].ndim >= 3:
        return "attention"
    if name == "topk":
        return "choice"
    return "activation" if name in _ACTIVATIONS else None


def trace(model: nn.Module, inputs: Mapping[str, object]) -> Trace:
    """Record a forward pass of the model, without gradients. Use tiny inputs, because memory holds every tensor."""
    follower = _Follower(model)
    with temporary_hooks() as hooks:
        for module in follower.paths:
            hooks.append(module.register_forward_pre_hook(follower.enter, with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(follower.leave))
        with torch.no_grad(), follower:
            model(**inputs)
    return follower.trace
