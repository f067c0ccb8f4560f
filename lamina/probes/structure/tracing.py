"""One small forward pass, written down: which module was called on which tensor, and how tensors were added.

Tensors are followed by identity, under a dispatch mode that sees every addition, scaling and copy, wherever it is
written. ``wiring`` reads the layers, sub-layers and norms off the record; no module's name is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    """A module's call. Times count the events of the whole pass; values number the tensors."""

    module: nn.Module
    path: str
    number: int  # which call of this module it is
    parent: Call | None
    began: int
    inputs: dict[int | str, int]
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
        """Whether this call happened in the other one, or is it."""
        return other.began <= self.began and self.ended <= other.ended


@dataclass(eq=False)
class Op:
    """An operation that matters: kind add | scale | same | parts | activation | attention | choice."""

    kind: str
    time: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: Call | None
    factor: Any = None


@dataclass(eq=False)
class Trace:
    """All of one forward pass: its calls in the order in which they began, its operations, and its tensors' shapes."""

    calls: list[Call] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises: transformers decides so by the class' name, too; projections with norms aren't."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Linear) and not any(module.children())


def effective_gain(norm: nn.Module) -> torch.Tensor | None:
    """What a norm multiplies the normalised channels by, [channels]; None where it has no gain.

    Found by norming a known vector, since some store the gain and some (Gemma) its difference from 1.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    weight = weight.detach()
    sign = torch.ones_like(weight)
    sign[::2] = -1
    bias = getattr(norm, "bias", None)
    with torch.no_grad():
        try:
            normed, doubled = (norm(sign[None, None] * size).flatten().float() for size in (8, 16))
            if float((doubled - normed).abs().max()) > 0.1 * float(normed.abs().max()):
                return weight.float()  # MobileBERT's NoNorm only multiplies
        except (
            TypeError,
            AttributeError,
        ):  # a gated norm, which takes the gate beside the channels: the same for each of them here
            normed = _gated(norm, sign)
    if normed is None or normed.shape != weight.shape:
        return None
    if isinstance(bias, torch.Tensor):
        normed = normed - bias.detach().float()
    measured = normed * sign.float()
    plain, shifted = weight.float(), weight.float() + 1
    far = ((measured - shifted).abs().mean() < (measured - plain).abs().mean()).item()
    return shifted if far else plain


def _gated(norm: nn.Module, sign: torch.Tensor) -> torch.Tensor | None:
    """What a gated norm makes of a known vector, without the gate: one of 20 in every channel, whose SiLU is 20."""
    gate = 20.0
    try:
        return norm(sign[None, None] * 8, torch.full_like(sign, gate)[None, None]).flatten().float() / gate
    except (TypeError, AttributeError, RuntimeError):
        return None


class _Follower(TorchDispatchMode):
    def __init__(self, trace: Trace):
        super().__init__()
        self.trace, self.stack, self.clock = trace, [], itertools.count()
        self.values: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # so that no identity is used twice
        self.times: dict[int, int] = {}

    def value(self, tensor: torch.Tensor, new: bool = False) -> int:
        """The number of a tensor; a new one where it was just written."""
        if new or id(tensor) not in self.values:
            self.values[id(tensor)] = len(self.trace.shapes)
            self.trace.shapes.append(tuple(tensor.shape))
            self.trace.floating.append(tensor.is_floating_point())
            self.alive.append(tensor)
        return self.values[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func, args)
        inputs = tuple(self.value(a) for a in args if isinstance(a, torch.Tensor)) if kind else ()
        result = func(*args, **(kwargs or {}))
        if kind:
            outputs = [r for r in (result if isinstance(result, tuple | list) else [result]) if torch.is_tensor(r)]
            factor = None
            if kind == "scale":
                factor = (args[1], args[0])  # what each operand is multiplied by
                if func in (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar):
                    factor = (1.0 / args[1], None)
            numbers = tuple(self.value(r, new=True) for r in outputs)
            call = self.stack[-1] if self.stack else None
            self.trace.ops.append(Op(kind, next(self.clock), inputs, numbers, call, factor))
        return result

    def enter(self, module: nn.Module, path: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        number = self.times.get(id(module), 0)
        self.times[id(module)] = number + 1
        inputs = {key: self.value(a) for key, a in [*enumerate(args), *kwargs.items()] if isinstance(a, torch.Tensor)}
        parent = self.stack[-1] if self.stack else None
        call = Call(module, path, number, parent, next(self.clock), inputs)
        if parent is not None:
            parent.children.append(call)
        self.trace.calls.append(call)
        self.stack.append(call)

    def leave(self, output: Any) -> None:
        call = self.stack.pop()
        call.ended = next(self.clock)
        found = first_tensor(output)
        if found is not None:
            call.output = self.value(found)


def _kind(func: Any, args: tuple) -> str | None:
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


def first_tensor(output: Any) -> torch.Tensor | None:
    """The tensor that a module hands on: its output, or the first in it."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def trace(model: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    """Run ``model(**inputs)`` without gradients and write it down. Keep the inputs tiny: every tensor is held."""
    record = Trace()
    follower = _Follower(record)
    handles = []

    def hooks(path: str) -> Iterator[Any]:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            follower.enter(module, path, args, kwargs)

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            follower.leave(output)

        yield before
        yield after

    for path, module in model.named_modules():
        before, after = hooks(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with torch.no_grad(), follower:
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return record
