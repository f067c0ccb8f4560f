"""The gains of the norms that were found in a model."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import torch
from torch import nn

from lamina.probes.structure.sites import Structure, effective_gain

Gain: TypeAlias = tuple[int, str, str, int, float, torch.Tensor]
"""layer (-1 outside the layers), sub-layer, role, which of several there, what the norm adds to it, the gain."""


def gains_of(structure: Structure) -> list[Gain]:
    """Every norm's learned gain, with its place."""
    gains: list[Gain] = []
    known: Counter[tuple[int, str, str]] = Counter()
    for layer, sublayer, norm in structure.norms():
        if isinstance(weight := getattr(norm.module, "weight", None), torch.Tensor) and weight.ndim == 1:
            place = (layer, "block" if layer < 0 else sublayer, norm.role)
            gains.append((*place, known[place], _offset(norm.module), weight))
            known[place] += 1
    return gains


def _offset(norm: nn.Module) -> float:
    """What a norm adds to its stored gain: 1 for Gemma's, 0 for others."""
    weight = norm.weight.detach()  # type: ignore[union-attr]
    try:
        effective = effective_gain(norm)
    except RuntimeError:  # a sharded weight
        return 0.0
    return 0.0 if effective is None else float(round(float((effective - weight.float()).mean())))
