"""The pass that `lamina.check` runs on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lamina.errors import UserError, one_line
from lamina.probes.structure.hooks import Output, fresh_gradients
from lamina.training.monitor.graph_hooks import is_compiled

LossOf: TypeAlias = Callable[[nn.Module, Output], Output]


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """The result of one forward and backward pass.

    Attributes:
        loss: the loss's value.
        logits: the model's logits, if it returns any.
        gradients: the root mean square of each parameter's gradient, by the ids of the parameters that got one.
        ran: the ids of the modules that were called.
        causal: whether the first token's logits do not depend on the last token; None if unknown.
        stuck: the ids of matrices of zeros whose gradient stays 0 forever.
        mixes: whether the first row's logits depend on the other rows of the batch; None if unknown.
        calls: the arguments of the first call of each function of ``WATCHED``, by the function's name.
        rises: whether the loss falls when its only cross-entropy rises.
    """

    loss: float
    logits: torch.Tensor | None
    gradients: Mapping[int, float]
    ran: frozenset[int]
    causal: bool | None
    stuck: frozenset[int]
    mixes: bool | None = None
    calls: Mapping[str, Mapping[str, Output]] = field(default_factory=dict)
    rises: bool = False

    @property
    def reached(self) -> Set[int]:
        """The ids of the parameters that got a gradient."""
        return self.gradients.keys()


WATCHED = {
    functional.cross_entropy: "cross_entropy",
    functional.nll_loss: "nll_loss",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits",
    functional.multi_head_attention_forward: "attention",
    functional.scaled_dot_product_attention: "attention",
}


class _Calls(TorchFunctionMode):
    """Keeps the arguments of the first call of each watched function, and all cross-entropies."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, dict[str, Output]] = {}
        self.losses: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Output], types: Output, args: tuple = (), kwargs: dict[str, Output] | None = None
    ) -> Output:
        output = func(*args, **(kwargs or {}))
        name = WATCHED.get(func)
        if name == "attention" and name not in self.first:  # a function of torch's own has no signature
            mask = (kwargs or {}).get("attn_mask")
            self.first[name] = {"mask": args[3] if mask is None and 3 < len(args) < 8 else mask}
        elif name is not None and name != "attention":
            self.first.setdefault(name, inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
            if name == "cross_entropy" and output.requires_grad:
                output.retain_grad()
                self.losses.append(output)
        return output

    @property
    def rises(self) -> bool:
        slopes = [loss.grad for loss in self.losses]
        slope = slopes[0] if len(slopes) == 1 else None
        return slope is not None and bool(slope.any()) and float(slope.max()) <= 0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; of a sharded tensor, this process's part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def arguments_of(model: nn.Module, batch: object) -> tuple[tuple, dict[str, Output]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}


def _parts(output: Output) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the loss and the logits among a model's outputs."""
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
        return get("loss"), get("logits")
    tensors = [x for x in (output if isinstance(output, list | tuple) else (output,)) if isinstance(x, torch.Tensor)]
    scalars, matrices = [x for x in tensors if x.numel() == 1], [x for x in tensors if x.ndim > 1]
    return next(iter(scalars), None), next(iter(matrices), None)


def first_pass(
    model: nn.Module,
    batch: object,
    loss_of: LossOf | None,
    tokens: torch.Tensor | None,
    others: Iterable[torch.Tensor] = (),
) -> FirstPass | None:
    """Run a forward and backward pass; restore gradients, random states and buffers. Returns None without a loss.

    ``others`` are trainable tensors that are not among the model's parameters.
    """
    every = [*model.parameters(), *others]
    args, kwargs = arguments_of(model, batch)
    ran, outputs, calls = set[int](), [], _Calls()
    given: list[tuple[tuple, dict[str, Output]]] = []
    hooks = [module.register_forward_pre_hook(lambda m, a: ran.add(id(m))) for module in model.modules()]
    hooks.append(model.register_forward_hook(lambda m, a, output: outputs.append(output)))
    hooks.append(model.register_forward_pre_hook(lambda m, a, k: given.append((a, k)), with_kwargs=True))

    def loss_and_logits() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        outputs.clear()
        if loss_of is None:
            return _parts(model(*args, **kwargs))
        loss = loss_of(model, batch)
        return loss, _parts(outputs[0])[1] if outputs else None

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"][:1]
    try:
        with torch.random.fork_rng(devices=devices), fresh_gradients(every):
            with nullcontext() if is_compiled(model) else calls:
                loss, logits = loss_and_logits()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                return None
            if loss.requires_grad:
                loss.backward()
            gradients = {
                id(p): float(whole(p.grad).float().square().mean().sqrt()) for p in every if p.grad is not None
            }
            logits = None if logits is None else logits.detach()
            stuck = _stuck(model, lambda: loss_and_logits()[0])
        return FirstPass(
            loss=float(loss.detach()),
            logits=logits,
            gradients=gradients,
            ran=frozenset(ran),
            causal=None if logits is None or tokens is None else _is_causal(model, *given[0], tokens),
            stuck=stuck,
            mixes=None if logits is None else _mixes_rows(model, *given[0]),
            calls=calls.first,
            rises=calls.rises,
        )
    except Exception as error:  # any model and batch may come
        raise UserError(f"batch: {type(model).__name__} does not run on it ({one_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in model.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def _stuck(model: nn.Module, loss_of: Callable[[], torch.Tensor | None]) -> frozenset[int]:
    """Return the matrices of zeros whose gradient is 0, and stays 0 when all others that get a gradient have moved.

    They are a stuck pair only if they get a gradient as soon as all of them are other than 0. The passes replace zeros
    alone, so that the weights are afterwards as they were.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.ndim > 1 and p.grad is not None]
    if any(isinstance(p, DTensor) for p in trained):
        return frozenset()
    zeros = [p for p in trained if p.numel() and not bool(p.detach().any())]

    def without_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.grad is None or not bool(p.grad.any())]

    def after_moving(parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            nn.init.normal_(p, std=0.02)
        model.zero_grad(set_to_none=True)
        loss = loss_of()
        if loss is not None:
            loss.backward()

    still = without_gradient(zeros)
    if not still:
        return frozenset()
    try:
        moving = [p for p in zeros if all(p is not other for other in still)]
        while still and moving:
            after_moving(moving)
            now = without_gradient(still)
            moving = [p for p in still if all(p is not other for other in now)]
            still = now
        if still:
            after_moving(still)
        alone = without_gradient(still)
        return frozenset(id(p) for p in still if all(p is not other for other in alone))
    finally:
        for p in zeros:
            nn.init.zeros_(p)


@torch.no_grad()
def _logits_of(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Output], values: Mapping[int, torch.Tensor]
) -> torch.Tensor | None:
    """Return a model's logits in evaluation mode, with other values for the arguments of these ids."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        given = {name: values.get(id(x), x) for name, x in kwargs.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits = _parts(model(*(values.get(id(x), x) for x in args), **given))[1]
    finally:
        for module, mode in modes:
            module.training = mode
    return None if logits is None or not bool(logits.isfinite().all()) else logits.float()


def _differ(first: torch.Tensor, second: torch.Tensor, share: float) -> bool | None:
    """Return whether two results differ by more than a share of their standard deviation; None for rounding."""
    if torch.allclose(first, second, rtol=share / 10, atol=share / 100):
        return False
    return True if float((first - second).std()) > share * float(first.std()) else None


def _is_causal(model: nn.Module, args: tuple, kwargs: Mapping[str, Output], tokens: torch.Tensor) -> bool | None:
    """Return whether the first token's logits stay as they are when the last token changes; None if unknown."""
    if not any(x is tokens for x in (*args, *kwargs.values())):
        return None
    changed = tokens.clone()
    changed[:, -1] = torch.where(changed[:, -1] == changed[:, 0], changed[:, 1], changed[:, 0])
    first, second = (_logits_of(model, args, kwargs, {id(tokens): new}) for new in (tokens, changed))
    if first is None or second is None or first.ndim != 3:
        return None
    differ = _differ(first[:, 0], second[:, 0], 0.01)
    return None if differ is None else not differ


def _mixes_rows(model: nn.Module, args: tuple, kwargs: Mapping[str, Output]) -> bool | None:
    """Return whether the first row's logits change with the inputs of the other rows; None if unknown."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim > 1][:1]
    if not inputs or len(inputs[0]) < 2:
        return None
    changed = inputs[0].clone()
    changed[1:] = changed[:1]
    first, second = (_logits_of(model, args, kwargs, {id(inputs[0]): new}) for new in (inputs[0], changed))
    if first is None or second is None or first.shape[0] != len(changed) or first.shape[-1] == len(changed):
        return None
    whole_floats = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return _differ(first[0], second[0], 1e-3 if whole_floats else 0.01)
