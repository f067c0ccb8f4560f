"""Whether a model of text is causal: whether a token's output depends on the tokens behind it."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from lamina.modeling.hooks import temporary_hooks
from lamina.probes.structure.forward import forward
from lamina.probes.structure.outputs import Args

_TOKENS = 8
# The last token's part in the outputs before it, over its part in its own. By gradients it is exactly 0 in the 41
# decoders that were tried, in float32 and in bfloat16; with another token in its place it is at most 7e-7 there
# (experts group their tokens anew, which rounds differently). In models that read both ways it is at least 2e-3 by
# either, with random weights, which look at other tokens least.
_LEAST = 1e-4
_causal: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_causal(model: nn.Module, ids: torch.Tensor) -> bool:
    """Whether no token's output depends on a later one; ``ids`` [sequences, tokens]. Cached per model.

    Decided by the gradient of the outputs with respect to the last token's embedding; if a model has no such
    gradient, by changing the last token. Both are compared with the effect of the last token on its own output, so that
    rounding does not count.
    """
    if model not in _causal:
        ids = ids[:1, :_TOKENS]
        try:
            share = _by_gradient(model, ids)
        except (NotImplementedError, RuntimeError, AttributeError):
            share = None
        share = _by_change(model, ids) if share is None else share
        _causal[model] = share < _LEAST
    return _causal[model]


def _by_gradient(model: nn.Module, ids: torch.Tensor) -> float | None:
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings is None:
        return None
    states: list[torch.Tensor] = []

    def begin(module: nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        states.append(output.detach().requires_grad_())
        return states[-1].clone()  # some models write into it

    with temporary_hooks() as hooks, torch.enable_grad():
        hooks.append(embeddings().register_forward_hook(begin))
        output = forward(model, {"input_ids": ids})[0]
    if (
        len(states) != 1
        or states[0].shape[:2] != ids.shape
        or output.shape[:2] != ids.shape
        or not output.requires_grad
    ):
        return None
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)

    def part(start: int, end: int) -> float:
        total = (output[:, start:end] * weights[:, start:end]).sum()
        (gradient,) = torch.autograd.grad(total, states[0], retain_graph=True, allow_unused=True)
        return 0.0 if gradient is None else float(gradient[0, -1].double().norm())

    return _share(part(0, ids.shape[1] - 1), part(ids.shape[1] - 1, ids.shape[1]))


def _by_change(model: nn.Module, ids: torch.Tensor) -> float:
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % (int(ids.max()) + 1) if int(ids.max()) else 1
    with torch.no_grad():
        first, second = (forward(model, {"input_ids": x})[0].double() for x in (ids, other))
    changed = (first - second).abs()
    return _share(float(changed[:, :-1].max()) if changed.shape[1] > 1 else 0.0, float(changed[:, -1].max()))


def _share(before: float, own: float) -> float:
    return before / own if own > 0 else float(before > 0)
