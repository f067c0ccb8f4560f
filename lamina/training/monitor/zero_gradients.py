"""Change parameters to find out whether a loss depends on them, and why parameters get no gradient."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamina.probes.structure.hooks import Output, evaluating, first_tensor

Run: TypeAlias = Callable[[], torch.Tensor | None]

IDLE = 1e-6  # below this fraction of the median gradient, a gradient is rounding error
_MOVED = 0.02  # the least standard deviation of the noise that moves parameters


class ZeroGradients(NamedTuple):
    """The ids of trainable parameters that get no gradient, by cause."""

    # all-zero parameters with a gradient of 0, because other all-zero parameters multiply them
    stuck: frozenset[int] = frozenset()
    # matrices with a gradient of 0 (or rounding error) even if no parameter is all-zero
    idle: frozenset[int] = frozenset()
    # parameters without a gradient, although the loss changes if these parameters change
    cut: frozenset[int] = frozenset()


def size_of(gradient: torch.Tensor) -> float:
    """Return the root mean square of a gradient, or of this process's part of a sharded gradient."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return float(local.detach().float().square().mean().sqrt())


@contextmanager
def moved(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside the context, add noise to parameters. At the end, restore the parameters exactly."""
    before = [(p, p.detach().clone()) for p in parameters]
    with torch.no_grad():
        for p, value in before:
            p.add_(torch.randn_like(p) * max(float(value.float().square().mean().sqrt()), _MOVED))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)


def zero_gradients(model: nn.Module, sizes: Mapping[int, float], run: Run) -> ZeroGradients:
    """Run more passes in evaluation mode to find why parameters get no gradient. ``sizes`` are the gradients' sizes."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if any(isinstance(p, DTensor) for p in named.values()):
        return ZeroGradients()
    quiet = _quiet(named.values(), sizes)
    if not quiet:
        return ZeroGradients()

    def backward() -> dict[int, float]:
        model.zero_grad(set_to_none=True)
        if (loss := run()) is not None and loss.requires_grad:
            loss.backward()
        return {id(p): size_of(p.grad) for p in named.values() if p.grad is not None}

    with evaluating(model), ExitStack() as stack:
        zeros = [p for name, p in named.items() if not name.endswith("bias") and not bool(p.detach().any())]
        still = [p for p in zeros if not sizes.get(id(p))]
        moving, now = [p for p in zeros if sizes.get(id(p))], dict(sizes)
        while True:
            stack.enter_context(moved(moving))
            now = backward()
            moving = [p for p in still if now.get(id(p))]
            still = [p for p in still if not now.get(id(p))]
            if not moving:
                break
        if still:
            stack.enter_context(moved(still))
            now = backward()
        if not now:  # a model may return no loss in evaluation mode
            return ZeroGradients()
        quiet &= _quiet(named.values(), now)
        none = {key for key in quiet if key not in sizes and key not in now}
        return ZeroGradients(
            stuck=frozenset(id(p) for p in still if now.get(id(p))),
            idle=frozenset(id(p) for p in named.values() if p.ndim > 1 and id(p) in quiet - none),
            cut=frozenset(_cut(_parts(named, none), run)),
        )


def _quiet(parameters: Iterable[nn.Parameter], sizes: Mapping[int, float]) -> set[int]:
    least = IDLE * statistics.median(sizes.values()) if sizes else 0.0
    return {id(p) for p in parameters if sizes.get(id(p), 0.0) <= least}


def _parts(named: Mapping[str, nn.Parameter], none: Collection[int]) -> list[list[nn.Parameter]]:
    """Group parameters without a gradient by the largest enclosing module that gets no gradient."""

    def around(name: str) -> list[str]:
        return [name[:at] for at, letter in enumerate(f"{name}.") if letter == "."]

    learning = {part for name, p in named.items() if id(p) not in none for part in around(name)}
    parts: dict[str, list[nn.Parameter]] = {}
    for name, p in named.items():
        if id(p) in none:
            largest = next(part for part in around(name) if part not in learning)
            # the same module in different layers forms one group
            parts.setdefault(re.sub(r"\d+", "", largest), []).append(p)
    return list(parts.values())


@torch.no_grad()
def _cut(parts: Iterable[Sequence[nn.Parameter]], run: Run) -> Iterator[int]:
    """Yield the ids of the parameters in ``parts`` that change the loss."""

    def value() -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss = run()
        return float("nan") if loss is None else float(loss)

    for part in parts:
        first, second = value(), value()
        with moved(part):
            changed = value()
        if abs(changed - first) > 3 * abs(second - first):
            yield from map(id, part)


def is_own_reference(model: nn.Module, ran: Mapping[int, Collection[bool]], run: Run) -> bool:
    """Return whether the reference or teacher of the loss is the trained model itself.

    Such a loss calls the model once with gradients and once without. After any change of the weights, both calls
    still return equal outputs. For ``ran``, see ``FirstPass``.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in trained)
    parts = (m for m in model.modules() if len(ran.get(id(m), ())) == 2)
    parts = [m for m in parts if 2 * sum(p.numel() for p in m.parameters() if p.requires_grad) > size]
    if not parts or any(isinstance(p, DTensor) for p in trained):
        return False
    seen: list[tuple[int, bool, torch.Size, float]] = []

    def see(module: nn.Module, args: tuple, output: Output) -> None:
        if (x := first_tensor(output)) is not None:
            x = x.detach().double()
            order = torch.arange(x.numel(), device=x.device, dtype=x.dtype)
            seen.append((id(module), torch.is_grad_enabled(), x.shape, float(x.flatten() @ order.cos())))

    hooks = [part.register_forward_hook(see) for part in parts]
    try:
        with evaluating(model), moved(trained):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    for part in map(id, parts):
        ours, others = ([each[2:] for each in seen if each[:2] == (part, own)] for own in (True, False))
        twins = [any(s == t and math.isclose(x, y, rel_tol=1e-5) for t, y in others) for s, x in ours]
        if twins and all(twins):
            return True
    return False
