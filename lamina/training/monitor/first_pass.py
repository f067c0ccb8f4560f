"""The pass that `lamina.check` runs on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamina.errors import UserError, one_line
from lamina.probes.structure.hooks import Output, fresh_gradients

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
        stuck: the ids of matrices of zeros that can never get another gradient than 0.
    """

    loss: float
    logits: torch.Tensor | None
    gradients: Mapping[int, float]
    ran: frozenset[int]
    causal: bool | None
    stuck: frozenset[int]

    @property
    def reached(self) -> Set[int]:
        """The ids of the parameters that got a gradient."""
        return self.gradients.keys()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; of a sharded one, this process's part."""
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
    ran, outputs = set[int](), []
    hooks = [module.register_forward_pre_hook(lambda m, a: ran.add(id(m))) for module in model.modules()]
    hooks.append(model.register_forward_hook(lambda m, a, output: outputs.append(output)))

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
            causal=None if logits is None or tokens is None else _is_causal(model, args, kwargs, tokens),
            stuck=stuck,
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
def _is_causal(model: nn.Module, args: tuple, kwargs: Mapping[str, Output], tokens: torch.Tensor) -> bool | None:
    """Return whether the first token's logits stay as they are when the last token changes; None if unknown."""
    changed = tokens.clone()
    changed[:, -1] = torch.where(changed[:, -1] == changed[:, 0], changed[:, 1], changed[:, 0])
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        given = [
            _parts(
                model(
                    *(new if x is tokens else x for x in args),
                    **{name: new if x is tokens else x for name, x in kwargs.items()},
                )
            )[1]
            for new in (tokens, changed)
        ]
    finally:
        for module, mode in modes:
            module.training = mode
    first, second = (None if x is None or x.ndim != 3 else x[:, 0].float() for x in given)
    if first is None or second is None or not bool(first.isfinite().all()):
        return None
    if torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        return True
    return False if float((first - second).std()) > 0.01 * float(first.std()) else None  # None: rounding
