"""Presets: a model type of transformers and the fields that the paper states."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from lamina.core.hub_access import local_when_unreachable
from lamina.core.values import text, whole_number
from lamina.errors import UserError, nearest
from lamina.modeling.backbones.configurations import read_config


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A backbone's sizes; ``fields`` are those of the configuration of ``model_type`` in transformers."""

    name: str
    source: str
    model_type: str = "llama"
    fields: Mapping[str, object] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        """A fresh configuration of the backbone."""
        return AutoConfig.for_model(self.model_type, **self.fields)


def _llama(name: str, source: str, width: int, ffn: int, heads: int, layers: int, **more: object) -> Preset:
    fields: dict[str, object] = {
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


def _vit(name: str, width: int, heads: int) -> Preset:
    labels = {i: f"class_{i}" for i in range(1000)}
    fields = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": 12,
        "id2label": labels,
        "label2id": {label: i for i, label in labels.items()},
    }
    return Preset(name=name, source=_MIX_VIT, model_type="vit", fields=fields)


_MIX_VIT = "Mix-LN Table 4 (ImageNet-1K); sizes of DeiT, which it does not print"
_MIX = "Mix-LN Table 7 and its repository"
_MIX_250M = "Mix-LN's repository; Table 7 says width 1024, which gives 355M parameters, 768 gives 247M"
_FUSE = "FuseNorm App B"
_PROXY = "FuseNorm Figure 4's 310M proxy, 64 layers of width 640; heads of 64, FFN fitted to 310M (not printed)"
_PERI = "Peri-LN Section 4; FFN 4 d (the text states none; 4 d fits its parameter counts)"
_DEEP = "FuseNorm's 128 blocks; width and FFN derived from 6.5B (not printed)"
_STRESS = "FuseNorm's stress test; heads of 64 and FFN 8 d / 3 (not printed)"
_KEEL = "Keel Section 5.3, {} layers = sub-layers; vocabulary not printed"
_MOE = "FuseNorm's MoE: sizes of DeepSeek-V2-Lite (whose label 16B-A2.4B is), V3's routing (sigmoid, Moonlight's 2.446)"
_MOE_FIELDS = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
_NANO_MOE = "Lamina's smallest mixture of experts: the wiring of 16b-a2.4b, 2 of 8 experts, trains on two cores"
_NANO_MOE_FIELDS = {
    **_MOE_FIELDS,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "vocab_size": 32000,
}
_KEEL_FIELDS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_PERI_FIELDS = {"max_position_embeddings": 8192, "vocab_size": 100277}  # cl100k_base
_MIX_FIELDS = {"max_position_embeddings": 1024, "rms_norm_eps": 1e-6}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _llama("llama-nano", "Lamina's default: deep and narrow, trains in a minute on two cores", 48, 128, 2, 32),
        _llama("llama-71m", _MIX, 512, 1368, 8, 12, **_MIX_FIELDS),
        _llama("llama-130m", _MIX, 768, 2048, 12, 12, **_MIX_FIELDS),
        _llama("llama-250m", _MIX_250M, 768, 2560, 16, 24, **_MIX_FIELDS),
        _llama("llama-1b", _MIX, 2048, 5461, 32, 24, **_MIX_FIELDS),
        _llama("llama-7b", _MIX, 4096, 11008, 32, 32, **{**_MIX_FIELDS, "max_position_embeddings": 2048}),
        _llama("llama-310m-proxy", _PROXY, 640, 1728, 10, 64, tie_word_embeddings=True),
        _llama("llama-740m", _FUSE, 1536, 4224, 24, 24, tie_word_embeddings=True),
        _llama("llama-1.3b", _FUSE, 1536, 4224, 24, 48, tie_word_embeddings=True),
        _llama("llama-5b", _FUSE, 2560, 6912, 40, 64),
        _llama("llama-6.5b-deep", _DEEP, 2048, 5504, 32, 128),
        *(_llama(f"llama-stress-384x{depth}", _STRESS, 384, 1024, 6, depth) for depth in (32, 64, 128, 256, 512)),
        Preset(name="deepseek-nano", source=_NANO_MOE, model_type="deepseek_v3", fields=_NANO_MOE_FIELDS),
        Preset(name="16b-a2.4b", source=_MOE, model_type="deepseek_v3", fields=_MOE_FIELDS),
        _llama("llama-400m", _PERI, 1024, 4096, 8, 24, **_PERI_FIELDS),
        _llama("llama-1.5b", _PERI, 2048, 8192, 16, 24, **_PERI_FIELDS),
        _llama("llama-3.2b", _PERI, 2560, 10240, 16, 32, **_PERI_FIELDS),
        _llama("llama-3b-wide", _KEEL.format(128), 2048, 6144, 16, 64, **_KEEL_FIELDS),
        _llama("llama-3b-deep", _KEEL.format(512), 1024, 3072, 16, 256, **_KEEL_FIELDS),
        _vit("vit-tiny", 192, 3),
        _vit("vit-small", 384, 6),
    )
}


_ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def names() -> list[str]:
    """The names of all presets, smallest family first."""
    return list(PRESETS)


def get(name: str) -> Preset:
    """The preset of this name. Raises UserError that suggests the nearest."""
    if name not in PRESETS:
        raise UserError(
            f"unknown backbone {name!r}{nearest(name, PRESETS)} (allowed: {', '.join(PRESETS)}, a folder with a "
            "transformers config.json, or a model's name on the hub, as OWNER/NAME)"
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

    ``backbone``: a preset's name, a transformers configuration, a folder that holds one, or a model's name on the hub
    ("HuggingFaceTB/SmolLM2-135M"), of which only the configuration is read. With another ``hidden_size`` the
    feed-forward keeps its ratio (rounded up to a multiple of 8) and the head keeps its width as far as it divides.
    Raises UserError naming the invalid field.
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
            num_heads = _heads(hidden_size, _head_dim(config))
        ratio = config.intermediate_size / config.hidden_size
        changes |= {"hidden_size": hidden_size, "intermediate_size": _round_up(ratio * hidden_size)}
        if (expert := getattr(config, "moe_intermediate_size", None)) is not None:
            changes["moe_intermediate_size"] = _round_up(expert / config.hidden_size * hidden_size)
    if num_heads is not None:
        width = config.hidden_size if hidden_size is None else hidden_size
        if width % num_heads or (width // num_heads) % 2:
            raise UserError(
                f"num_heads: {num_heads} heads do not divide hidden_size {width} into heads of an even width "
                f"(allowed: {', '.join(str(h) for h in range(1, width + 1) if width % h == 0 and width // h % 2 == 0)})"
            )
        key_heads = getattr(config, "num_key_value_heads", None)
        changes["num_attention_heads"] = num_heads
        if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):  # MLA derives it
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
                raise UserError(f"{name}: the backbone {config.model_type!r} has none (it reads no tokens)")
            changes[name] = value
    return with_fields(config, changes)


def _find(backbone: str | Path | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(backbone, PreTrainedConfig):
        config = copy.deepcopy(backbone)
    elif str(backbone) not in PRESETS and (Path(backbone).is_dir() or _ON_THE_HUB.fullmatch(str(backbone))):
        with local_when_unreachable():
            config = read_config(backbone, "backbone", weights=False)
    else:
        config = get(str(backbone)).config()
    config = getattr(config, "backbone_config", None) or config  # a Lamina model's: the plan is chosen anew
    missing = [n for n in ("num_hidden_layers", "hidden_size", "num_attention_heads") if not hasattr(config, n)]
    if missing:
        raise UserError(f"backbone {config.model_type!r}: its configuration has no {missing[0]} (allowed: a decoder's)")
    return config


def with_fields(config: PreTrainedConfig, changes: Mapping[str, object]) -> PreTrainedConfig:
    fields = {**config.to_dict(), **changes}
    if changes.get("num_hidden_layers", config.num_hidden_layers) != config.num_hidden_layers:
        fields.pop("layer_types", None)  # the configuration derives it from the depth
    fields.pop("transformers_version", None)
    new = AutoConfig.for_model(fields.pop("model_type"), **fields)
    new._attn_implementation = config._attn_implementation
    return new


def _head_dim(config: PreTrainedConfig) -> int:
    """The width of a head; DeepSeek's ``head_dim`` is only the part of it that is rotated."""
    if hasattr(config, "kv_lora_rank"):
        return config.hidden_size // config.num_attention_heads
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _round_up(width: float) -> int:
    return -(-round(width) // 8) * 8


def _heads(width: int, head_dim: int) -> int:
    """As many heads as come nearest to the preset's width of a head, each of an even width (rotary embeddings)."""
    fitting = [h for h in range(1, width + 1) if width % h == 0 and width // h % 2 == 0]
    if not fitting:
        raise UserError(f"hidden_size: {width} cannot be divided into heads of an even width (allowed: even numbers)")
    return min(fitting, key=lambda h: abs(width // h - head_dim))
