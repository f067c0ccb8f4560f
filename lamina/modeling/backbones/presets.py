"""Presets: a model type of transformers and the fields that the paper states."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from lamina.errors import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A backbone's sizes; ``fields`` are those of the configuration of ``model_type`` in transformers."""

    name: str
    source: str
    model_type: str = "llama"
    fields: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        """A fresh configuration of the backbone."""
        return AutoConfig.for_model(self.model_type, **self.fields)


def _llama(name: str, source: str, width: int, ffn: int, heads: int, layers: int, **more: Any) -> Preset:
    fields = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        **more,
    }
    return Preset(name=name, source=source, fields=fields)


_MIX = "Mix-LN Table 7 and its repository"
_FUSE = "FuseNorm Table 4"
_PERI = "Peri-LN Section 4; FFN 4 d (the text states none; 4 d fits its parameter counts)"
_MIX_FIELDS = {"max_position_embeddings": 1024, "rms_norm_eps": 1e-6}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _llama("llama-nano", "Lamina's default: deep and narrow, trains in a minute on two cores", 48, 128, 2, 32),
        _llama("llama-71m", _MIX, 512, 1368, 8, 12, **_MIX_FIELDS),
        _llama("llama-130m", _MIX, 768, 2048, 12, 12, **_MIX_FIELDS),
        _llama("llama-250m", _MIX, 768, 2560, 16, 24, **_MIX_FIELDS),
        _llama("llama-1b", _MIX, 2048, 5461, 32, 24, **_MIX_FIELDS),
        _llama("llama-7b", _MIX, 4096, 11008, 32, 32, **{**_MIX_FIELDS, "max_position_embeddings": 2048}),
        _llama("llama-310m-proxy", _FUSE, 640, 1728, 10, 64, tie_word_embeddings=True),
        _llama("llama-740m", _FUSE, 1536, 4224, 24, 24, tie_word_embeddings=True),
        _llama("llama-1.3b", _FUSE, 1536, 4224, 24, 48, tie_word_embeddings=True),
        _llama("llama-5b", _FUSE, 2560, 6912, 40, 64),
        _llama("llama-400m", _PERI, 1024, 4096, 8, 24, max_position_embeddings=8192),
        _llama("llama-1.5b", _PERI, 2048, 8192, 16, 24, max_position_embeddings=8192),
        _llama("llama-3.2b", _PERI, 2560, 10240, 16, 32, max_position_embeddings=8192),
    )
}


def names() -> list[str]:
    """The names of all presets, smallest family first."""
    return list(PRESETS)


def get(name: str) -> Preset:
    """The preset of this name. Raises UserError that suggests the nearest."""
    if name not in PRESETS:
        raise UserError(
            f"unknown backbone {name!r}{nearest(name, PRESETS)} (allowed: {', '.join(PRESETS)}, or a folder with a "
            "transformers config.json)"
        )
    return PRESETS[name]


def resolve_backbone(
    backbone: str | Path | PreTrainedConfig,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    vocab_size: int | None = None,
    max_position_embeddings: int | None = None,
) -> PreTrainedConfig:
    """The backbone's configuration with the given sizes in place of its own.

    ``backbone``: a preset's name, a transformers configuration, or a folder that holds one. With another
    ``hidden_size`` the feed-forward keeps its ratio (rounded up to a multiple of 8) and the head keeps its width as
    far as it divides. Raises UserError naming the field that has no meaning.
    """
    config = _find(backbone)
    changes: dict[str, Any] = {}
    if hidden_size is not None and hidden_size != config.hidden_size:
        _positive("hidden_size", hidden_size)
        if num_heads is None:
            num_heads = _heads(hidden_size, _head_dim(config))
        ratio = config.intermediate_size / config.hidden_size
        changes |= {"hidden_size": hidden_size, "intermediate_size": -(-round(ratio * hidden_size) // 8) * 8}
    if num_heads is not None:
        _positive("num_heads", num_heads)
        width = changes.get("hidden_size", config.hidden_size)
        if width % num_heads or (width // num_heads) % 2:
            raise UserError(
                f"num_heads: {num_heads} heads do not divide hidden_size {width} into heads of an even width "
                f"(allowed: {', '.join(str(h) for h in range(1, width + 1) if width % h == 0 and width // h % 2 == 0)})"
            )
        groups = max(1, config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads))
        changes["num_attention_heads"] = num_heads
        if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):  # MLA derives it
            changes["head_dim"] = width // num_heads
        changes["num_key_value_heads"] = num_heads // groups if num_heads % groups == 0 else num_heads
    if num_layers is not None:
        _positive("num_layers", num_layers)
        changes["num_hidden_layers"] = num_layers
    if vocab_size is not None:
        _positive("vocab_size", vocab_size)
        changes["vocab_size"] = vocab_size
    if max_position_embeddings is not None:
        _positive("max_position_embeddings", max_position_embeddings)
        changes["max_position_embeddings"] = max_position_embeddings
    return _with(config, changes)


def _find(backbone: str | Path | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(backbone, PreTrainedConfig):
        config = copy.deepcopy(backbone)
    elif str(backbone) in PRESETS or not Path(backbone).is_dir():
        config = get(str(backbone)).config()
    elif not (Path(backbone) / "config.json").is_file():
        raise UserError(f"backbone {str(backbone)!r}: the folder holds no config.json")
    else:
        try:
            config = AutoConfig.from_pretrained(str(backbone))
        except (ValueError, OSError) as error:
            raise UserError(f"backbone {str(backbone)!r}: {' '.join(str(error).split())}") from error
    config = getattr(config, "backbone_config", None) or config  # a Lamina model's: the plan is chosen anew
    missing = [n for n in ("num_hidden_layers", "hidden_size", "num_attention_heads") if not hasattr(config, n)]
    if missing:
        raise UserError(f"backbone {config.model_type!r}: its configuration has no {missing[0]} (allowed: a decoder's)")
    return config


def _with(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    fields = {**config.to_dict(), **changes}
    if changes.get("num_hidden_layers", config.num_hidden_layers) != config.num_hidden_layers:
        fields.pop("layer_types", None)  # the configuration derives it from the depth
    fields.pop("transformers_version", None)
    new = AutoConfig.for_model(fields.pop("model_type"), **fields)
    new._attn_implementation = config._attn_implementation
    return new


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _heads(width: int, head_dim: int) -> int:
    """As many heads as come nearest to the preset's width of a head, each of an even width (rotary embeddings)."""
    fitting = [h for h in range(1, width + 1) if width % h == 0 and width // h % 2 == 0]
    if not fitting:
        raise UserError(f"hidden_size: {width} cannot be divided into heads of an even width (allowed: even numbers)")
    return min(fitting, key=lambda h: abs(width // h - head_dim))


def _positive(field_name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{field_name}: {value!r} is not a whole number of at least 1")
