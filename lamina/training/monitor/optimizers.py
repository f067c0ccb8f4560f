"""What the monitor asks of an optimizer: the one in a wrapper, its rate, its closure, how a step went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate.state import GradientState

from lamina.errors import UserError
from lamina.probes.structure.hooks import Kwargs, Output


@dataclass(frozen=True, kw_only=True)
class Taken:
    """How a step went.

    Attributes:
        norm: of its gradient, before clipping; None where no gradient was seen.
        stepped: whether an optimizer took it.
        measured: whether its update was measured.
        rate: the largest learning rate that the optimizers took it with, or have now if none did.
    """

    norm: torch.Tensor | None
    stepped: bool
    measured: bool
    rate: float | None


def stepping(optimizer: object) -> torch.optim.Optimizer:
    """The torch optimizer in accelerate's wrapper or DeepSpeed's. Raises UserError for something else."""
    inner: Output = optimizer
    while not type(inner).__module__.startswith("torch.") and isinstance(
        getattr(inner, "optimizer", None), torch.optim.Optimizer
    ):
        inner = inner.optimizer
    if not hasattr(inner, "register_step_pre_hook"):
        raise UserError(
            f"optimizer: a {type(optimizer).__name__} (allowed: a torch.optim.Optimizer, or a list of them)"
        )
    return inner


def largest_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float | None:
    """The largest learning rate of the optimizers' groups now; None if they have none (Adafactor's own step)."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(rate) for rate in rates if rate is not None), default=None)


def largest_beta2(optimizers: Sequence[torch.optim.Optimizer]) -> float | None:
    """The largest decay of the second moments; None for optimizers that have none."""
    betas = [group.get("betas") for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(pair[1]) for pair in betas if isinstance(pair, Sequence) and len(pair) == 2), default=None)


def loss_scale(optimizer: torch.optim.Optimizer) -> tuple[bool, torch.Tensor | None]:
    """Whether a GradScaler takes the step that begins, and the factor of gradients that it leaves to a fused optimizer.

    A fused optimizer is called though the gradient is infinite, and leaves the step out itself.
    """
    return getattr(optimizer, "found_inf", None) is not None, getattr(optimizer, "grad_scale", None)


def accumulates() -> bool:
    """Whether accelerate is between two micro-batches of a step: its optimizers leave out their steps then."""
    return not GradientState().sync_gradients


def after_closure(args: tuple, kwargs: Kwargs, act: Callable[[], None]) -> tuple[tuple, Kwargs] | None:
    """Call ``act`` when a step has its gradients: after the closure has computed them, or now if there is none.

    Args:
        args, kwargs: of ``optimizer.step``, as its pre-hooks get them; ``args`` begin with the optimizer.
        act: called before the update, once for each call of the closure (LBFGS calls it several times a step).

    Returns the arguments that take their place; None: they stay.
    """
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if not callable(closure):
        act()
        return None

    def measured() -> Output:
        loss = closure()
        act()
        return loss

    return (args, {**kwargs, "closure": measured}) if len(args) < 2 else ((args[0], measured, *args[2:]), kwargs)
