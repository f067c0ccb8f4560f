"""Norms: which modules are norms, and their gains."""

from __future__ import annotations

import torch
from torch import nn


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes: decided by class name, as in transformers; projections with norms do not count."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Linear) and not any(module.children())


def effective_gain(norm: nn.Module) -> torch.Tensor | None:
    """What a norm multiplies the normalized channels by, [channels]; None where it has no gain.

    Found by norming a known vector: some store the gain, others (Gemma) its difference from 1.
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
    """A gated norm's output for a known vector, divided by the gate: 20 in every channel, whose SiLU is 20."""
    gate = 20.0
    try:
        return norm(sign[None, None] * 8, torch.full_like(sign, gate)[None, None]).flatten().float() / gate
    except (TypeError, AttributeError, RuntimeError):
        return None
