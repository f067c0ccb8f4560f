"""The loss of a language model: of the next tokens, or of masked ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.errors import UserError
from lamina.probes.engine.causality import is_causal
from lamina.probes.structure.forward import forward
from lamina.probes.structure.outputs import Output

MASKED_SHARE = 0.15


def loss(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase | None = None
) -> torch.Tensor:
    """Mean cross-entropy in nats per predicted token, float32; see ``token_losses``."""
    return token_losses(model, inputs, tokenizer).mean()


def token_losses(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase | None = None
) -> torch.Tensor:
    """The cross-entropy of each predicted token, [batch, predicted]: next tokens, or masked ones (as many in each row).

    Raises UserError where the model predicts no tokens, or its mask token is unknown.
    """
    ids = inputs.get("input_ids")
    head = getattr(model, "get_output_embeddings", None)
    if ids is None or head is None or head() is None:
        raise UserError(
            f"loss: {type(model).__name__} has no head that predicts tokens (allowed: a causal or masked model)"
        )
    if is_causal(model, ids):
        logits = logits_of(forward(model, inputs))[:, :-1].float()
        return _cross_entropy(logits, ids[:, 1:])
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise UserError("loss: a masked language model needs its tokenizer's mask token (allowed: --tokenizer)")
    chosen = masked_positions(ids.shape[1]).to(ids.device)
    hidden = ids.clone()
    hidden[:, chosen] = mask
    logits = logits_of(forward(model, {**inputs, "input_ids": hidden}))[:, chosen].float()
    return _cross_entropy(logits, ids[:, chosen])


def logits_of(output: Output) -> torch.Tensor:
    """The logits [batch, tokens, vocabulary] of a model's output. Raises UserError where it has none."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise UserError(f"loss: {type(output).__name__} holds no logits (allowed: a causal or masked model)")
    return logits


def masked_positions(tokens: int) -> torch.Tensor:
    """The positions that are masked in a sequence: 15 % of them, the same ones each time, never the first or last."""
    count = max(1, round(tokens * MASKED_SHARE))
    order = torch.randperm(max(tokens - 2, 1), generator=torch.Generator().manual_seed(0)) + (1 if tokens > 2 else 0)
    return order[:count].sort().values


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
