"""Compute the loss of a causal or masked language model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.errors import UserError
from lamina.modeling.parts import temporary_hooks
from lamina.probes.structure.hooks import Args, Output, forward

_TOKENS = 8
# The last token's part in the outputs before it, over its part in its own. By gradients it is exactly 0 in the 41
# decoders that were tried, in float32 and in bfloat16; with another token in its place it is at most 7e-7 there
# (experts group their tokens anew, which rounds differently). In models that read both ways it is at least 2e-3 by
# either, with random weights, which look at other tokens least.
_LEAST = 1e-4
_causal: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
MASKED_SHARE = 0.15


def is_causal(model: nn.Module, ids: torch.Tensor) -> bool:
    """Return whether a model is causal: no token's output depends on a later token. Lamina caches the answer.

    Lamina computes the gradient of the earlier outputs with respect to the last token's embedding. If the model has no
    such gradient, Lamina changes the last token instead. The model is causal if the effect on the earlier outputs is
    below 1e-4 of the effect on the last output, which allows for rounding. ``ids`` is [sequences, tokens].
    """
    if model not in _causal:
        ids = ids[:1, :_TOKENS]
        try:
            share = _by_gradient(model, ids)
        except RuntimeError:  # quantized weights have no gradient, nor has what transformers does not implement
            share = None
        share = _by_change(model, ids) if share is None else share
        _causal[model] = share < _LEAST
    return _causal[model]


def _by_gradient(model: nn.Module, ids: torch.Tensor) -> float | None:
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(embeddings, nn.Module):
        return None
    states: list[torch.Tensor] = []

    def begin(module: nn.Module, args: Args, output: Output) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor):
            return None
        states.append(output.detach().requires_grad_())
        return states[-1].clone()  # some models write into it

    with temporary_hooks() as hooks, torch.enable_grad():
        hooks.append(embeddings.register_forward_hook(begin))
        output = forward(model, {"input_ids": ids})[0]
    shapes = [tensor.shape[:2] for tensor in (*states, output) if isinstance(tensor, torch.Tensor)]
    if shapes != [ids.shape] * 2 or not output.requires_grad:
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


def token_losses(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase | None = None
) -> torch.Tensor:
    """Return the cross-entropy of each predicted token [batch, predicted]. Raises UserError if a head or a mask token
    is missing.
    """
    ids = inputs.get("input_ids")
    head = getattr(model, "get_output_embeddings", None)
    if ids is None or head is None or head() is None:
        raise UserError(
            f"loss: {type(model).__name__} has no head that predicts tokens. Choose a causal or masked language model."
        )
    if is_causal(model, ids):
        logits, targets = logits_of(forward(model, inputs))[:, :-1].float(), ids[:, 1:]
    else:
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None:
            raise UserError(
                "loss: a masked language model needs its tokenizer's mask token. Name the tokenizer with --tokenizer."
            )
        masked = masked_positions(ids.shape[1]).to(ids.device)
        hidden, targets = ids.clone(), ids[:, masked]
        hidden[:, masked] = mask
        logits = logits_of(forward(model, {**inputs, "input_ids": hidden}))[:, masked].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def logits_of(output: Output) -> torch.Tensor:
    """Return the logits [batch, tokens, vocabulary] of a model's output. Raises UserError if the output has none."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise UserError(f"loss: {type(output).__name__} holds no logits. Choose a causal or masked language model.")
    return logits


def masked_positions(tokens: int) -> torch.Tensor:
    """Return the positions to mask in a sequence: the same random 15 % each time, except for the first and the last."""
    count = max(1, round(tokens * MASKED_SHARE))
    order = torch.randperm(max(tokens - 2, 1), generator=torch.Generator().manual_seed(0)) + (1 if tokens > 2 else 0)
    return order[:count].sort().values
