"""Create the configuration of a backbone from a preset, a folder or the hub, and change the sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lamina.core.backbone_presets import get, is_place
from lamina.core.hub_access import local_when_unreachable
from lamina.core.values import text, whole_number
from lamina.errors import UserError
from lamina.modeling.backbones.loading import read_config
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import HEADS, adapter_of

_SPECIAL = tuple(f"{token}_token_id" for token in ("pad", "bos", "eos", "cls", "sep"))


def preset_config(name: str) -> PreTrainedConfig:
    preset = get(name)
    return AutoConfig.for_model(preset.model_type, **preset.fields)


def resolve_backbone(
    backbone: str | Path | PreTrainedConfig,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    vocab_size: int | None = None,
    max_position_embeddings: int | None = None,
) -> PreTrainedConfig:
    """Return the backbone's configuration with changed sizes.

    If ``hidden_size`` changes, the feed-forward's width changes by the same factor, rounded to a multiple of 8. The
    number of heads changes so that a head's width stays about the same. Raises UserError for an invalid size.

    Args:
        backbone: a preset's name, a transformers configuration or its folder, or a name on the hub, such as
            "HuggingFaceTB/SmolLM2-135M". Lamina reads only the configuration.
    """
    if not isinstance(backbone, PreTrainedConfig):
        backbone = text("backbone", backbone)
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
    for name, value in sizes.items():
        if value is not None:
            whole_number(name, value)
    config = _find(backbone)
    changes: dict[str, object] = {}
    if hidden_size is not None and hidden_size != config.hidden_size:
        if num_heads is None:
            num_heads = _heads(hidden_size, head_dim_of(config))
        names = ("intermediate_size", "moe_intermediate_size", "n_inner")
        inner = {name: size for name in names if (size := getattr(config, name, None))}  # GPT-2's default is None
        for name, size in inner.items():  # to a multiple of 8, rounded up
            changes[name] = -(-round(size / config.hidden_size * hidden_size) // 8) * 8
        changes["hidden_size"] = hidden_size
    if num_heads is not None:
        width = config.hidden_size if hidden_size is None else hidden_size
        if num_heads not in (fitting := _fitting_heads(width)):
            raise UserError(
                f"num_heads: with {num_heads} heads, a hidden_size of {width} gives heads of an odd or fractional "
                f"width (allowed: {', '.join(map(str, fitting))})"
            )
        key_heads = getattr(config, "num_key_value_heads", None)
        changes["num_attention_heads"] = num_heads
        if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):  # MLA computes head_dim
            changes["head_dim"] = width // num_heads
        if key_heads:
            groups = max(1, config.num_attention_heads // key_heads)
            changes["num_key_value_heads"] = num_heads // groups if num_heads % groups == 0 else num_heads
    if num_layers is not None:
        changes["num_hidden_layers"] = num_layers
    for name, value in (("vocab_size", vocab_size), ("max_position_embeddings", max_position_embeddings)):
        if value is not None:
            whole_number(name, value)
            if not hasattr(config, name):
                raise UserError(
                    f"{name}: the backbone {config.model_type!r} reads no tokens, so the backbone has no {name}. "
                    f"Leave {name!r} out."
                )
            changes[name] = value
    return with_fields(config, changes)


def _find(backbone: str | Path | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(backbone, PreTrainedConfig):
        config = copy.deepcopy(backbone)
    elif is_place(str(backbone)):
        with local_when_unreachable():
            config = read_config(backbone, "backbone", weights=False)
    else:
        config = preset_config(str(backbone))
    config = getattr(config, "backbone_config", None) or config  # for a Lamina model, use only the backbone
    missing = [n for n in ("num_hidden_layers", "hidden_size", "num_attention_heads") if not hasattr(config, n)]
    if missing:
        raise UserError(f"backbone {config.model_type!r}: its configuration has no {missing[0]}. Choose a decoder.")
    return config


def with_fields(config: PreTrainedConfig, changes: Mapping[str, object]) -> PreTrainedConfig:
    fields = {**config.to_dict(), **changes}
    if changes.get("num_hidden_layers", config.num_hidden_layers) != config.num_hidden_layers:
        fields.pop("layer_types", None)  # the configuration derives it from the depth
    for name in _SPECIAL if "vocab_size" in changes else ():
        tokens = fields.get(name)
        if any(token >= fields["vocab_size"] for token in (tokens if isinstance(tokens, list) else [tokens or 0])):
            fields[name] = None  # outside the new vocabulary
    fields.pop("transformers_version", None)
    new = AutoConfig.for_model(fields.pop("model_type"), **fields)
    new._attn_implementation = config._attn_implementation
    return new


def cut_config(config: PreTrainedConfig, kept: Sequence[int], count: int) -> None:
    """Keep only the layers ``kept`` in a configuration's placement, depth, and lists with one entry per layer."""
    if isinstance(config, LaminaConfig) and config.plan is not None:
        config.plan = {**config.plan, "layers": [config.plan["layers"][index] for index in kept]}
    text = backbone_of(config)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count and "token" not in name and name != "architectures":
            setattr(text, name, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the full width of a head. (DeepSeek's field ``head_dim`` is only the rotated part.)"""
    if hasattr(config, "kv_lora_rank"):
        return config.hidden_size // config.num_attention_heads
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _heads(width: int, head_dim: int) -> int:
    return min(_fitting_heads(width), key=lambda h: abs(width // h - head_dim))


def _fitting_heads(width: int) -> list[int]:
    fitting = [h for h in range(1, width + 1) if width % h == 0 and width // h % 2 == 0]
    if not fitting:
        raise UserError(f"hidden_size: {width} is odd, but each head needs an even width. Give an even number.")
    return fitting


class Count(NamedTuple):
    """Parameter counts with embeddings and head. ``active`` counts only the experts that one token uses."""

    total: int
    active: int


def count_parameters(config: PreTrainedConfig) -> Count:
    """Count the parameters of transformers' model with this configuration. A tied parameter counts once.

    The model has a head if transformers has a class with a head. Two shallow models on the meta device are enough.
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
    """Count the parameters of a model. A tied parameter counts once."""
    config = backbone_of(model.config)
    sizes = [(parameter.numel(), used_by_a_token(name, config)) for name, parameter in model.named_parameters()]
    return Count(sum(size for size, _ in sizes), sum(int(size * used) for size, used in sizes))


def used_by_a_token(name: str, config: PreTrainedConfig) -> Fraction:
    """Return the fraction of a parameter that one token uses. The fraction is below 1 only for routed experts."""
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    routed = experts and ".experts." in name
    return Fraction(config.num_experts_per_tok, experts) if routed else Fraction(1)
