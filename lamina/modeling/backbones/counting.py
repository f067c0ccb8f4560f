"""The number of a backbone's parameters, and of those that one token uses."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lamina.modeling.backbones.presets import with_fields
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import HEADS, adapter_of


class Count(NamedTuple):
    """Parameters with embeddings and head; ``active`` counts only the routed experts that one token uses."""

    total: int
    active: int


def count_parameters(config: PreTrainedConfig) -> Count:
    """Count the parameters of transformers' own model of this configuration; tied ones count once.

    A model type that is registered without a head counts without one.

    Layers after the leading dense ones are alike, so two shallow models on the meta device suffice: a depth of 512
    takes no longer than one of 2.
    """
    first = (getattr(config, "first_k_dense_replace", None) or 0) + 1
    if config.num_hidden_layers <= first:
        return _count(config)
    short, longer = (_count(with_fields(config, {"num_hidden_layers": first + n})) for n in (0, 1))
    more = config.num_hidden_layers - first
    return Count(*(a + more * (b - a) for a, b in zip(short, longer, strict=True)))


def _count(config: PreTrainedConfig) -> Count:
    auto = getattr(transformers, HEADS[adapter_of(config).heads[0]].auto_class)
    auto = auto if type(config) in auto._model_mapping else transformers.AutoModel
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(config)
    model.tie_weights()
    return parameters_of(model)


def parameters_of(model: PreTrainedModel) -> Count:
    """Count the parameters of a model as it is; tied ones count once."""
    config = backbone_of(model.config)
    sizes = [(parameter.numel(), used_by_a_token(name, config)) for name, parameter in model.named_parameters()]
    return Count(sum(size for size, _ in sizes), sum(int(size * used) for size, used in sizes))


def used_by_a_token(name: str, config: PreTrainedConfig) -> Fraction:
    """The share of a parameter that one token uses: below 1 for a routed expert's."""
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    routed = experts and ".experts." in name
    return Fraction(config.num_experts_per_tok, experts) if routed else Fraction(1)
