"""Stochastic depth: whole branches are dropped in training (Huang et al. 2016, arXiv 1603.09382)."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.models.convnext.modeling_convnext import ConvNextDropPath

from lamina.modeling.parts import body_of, sublayers


def drop_branches(model: PreTrainedModel, rate: float) -> None:
    """Drop each sub-layer's branch for an item with a probability that grows with the layer, from 0 to ``rate``.

    Layer l of N (from 0) has the probability rate * l / (N - 1), as in DeiT and ConvNeXt; a branch that stays is
    divided by 1 - probability. Where a placement norms the branch, it is dropped after that norm. The model has no
    further weights, and evaluates as before.
    """
    body = body_of(model, "drop_path")
    last = max(1, len(body.layers) - 1)
    for layer, _, residual in sublayers(body):
        if probability := rate * layer / last:
            drop: nn.Module = ConvNextDropPath(probability)
            residual.dropout = drop if residual.dropout is None else nn.Sequential(residual.dropout, drop)
