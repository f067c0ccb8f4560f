"""How many parameters a backbone has, and how many of them a token passes through."""

from __future__ import annotations

from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from lamina.modeling.backbones.presets import with_fields
from lamina.modeling.modeling_lamina import HEADS, adapter_of


class Count(NamedTuple):
    """Parameters, embeddings and head included; ``active`` has of a layer's routed experts those that a token takes."""

    total: int
    active: int


def count_parameters(config: PreTrainedConfig) -> Count:
    """The parameters of transformers' own model of this configuration, tied ones once.

    From models of one and two layers more than the leading dense ones, on the meta device: the layers behind them are
    all alike, so a depth of 512 costs no more than one of 2.
    """
    first = (getattr(config, "first_k_dense_replace", None) or 0) + 1
    if config.num_hidden_layers <= first:
        return _count(config)
    short, longer = (_count(with_fields(config, {"num_hidden_layers": first + n})) for n in (0, 1))
    more = config.num_hidden_layers - first
    return Count(*(a + more * (b - a) for a, b in zip(short, longer, strict=True)))


def _count(config: PreTrainedConfig) -> Count:
    auto = getattr(transformers, HEADS[adapter_of(config).heads[0]].auto_class)
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(config)
    model.tie_weights()
    total = active = 0
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        total += size
        routed = experts and ".experts." in name
        active += size * config.num_experts_per_tok // experts if routed else size
    return Count(total, active)
